"""Elementary functions of the emulation: computed in FP64 and rounded once to FP32.

A CPU library's vectorised body and its scalar tail differ in the last bit, so that an FP32 result would depend on where
an element lies in its tensor, and a row's bits on its place in the batch. The FP64 results differ too, but only far
below FP32's last bit. It also makes the emulation's error that of the kernels' contract, not of a library.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), f32 of x's shape."""
    return torch.sigmoid(x.double()).float()


def exp(x: Tensor) -> Tensor:
    """e^x, f32 of x's shape."""
    return torch.exp(x.double()).float()


def exp2(x: Tensor) -> Tensor:
    """2^x, f32 of x's shape."""
    return torch.exp2(x.double()).float()


def log2(x: Tensor) -> Tensor:
    """Base-2 logarithm, f32 of x's shape."""
    return torch.log2(x.double()).float()


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, f32 of x's shape."""
    return torch.tanh(x.double()).float()
