"""Quantisation in the loop: the stored format's value forward, the identity backward (straight-through)."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_mxfp4(w: Tensor) -> Tensor:
    """What `numerics.formats` gives back after MXFP4 (blocks of 32 on the last axis), without host synchronisation."""
    blocks = w.detach().float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa > 0.75, exponent - 2, exponent - 3)  # the least scale with amax / scale <= 6
    scale = torch.ldexp(torch.ones_like(amax), torch.where(amax == 0, torch.zeros_like(exponent), exponent))
    x = blocks / scale
    magnitude = x.abs()
    # Steps of E2M1 are 0.5 below 2, 1 below 4 and 2 below 6; torch.round takes ties to the even code.
    step = 0.5 * (1.0 + (magnitude >= 2).float() + 2.0 * (magnitude >= 4).float())
    rounded = (torch.round(x / step) * step * scale).flatten(-2)
    straight_through: Tensor = w + (rounded - w).detach()
    return straight_through


def fake_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """What an E4M3 row stored as `e4m3(x / scale)` gives back, scale a scalar; saturates at 448."""
    stored = (x.detach().float() * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    return x + ((stored * scale).to(x.dtype) - x).detach()
