"""Emulated KDA core: conv update, gates, l2norm, delta rule and gated norm as one fused boundary.

Unlike the generic path nothing between the projection and the gated norm is rounded, except the `f_b` product (BF16
before the gate). The state is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS
from decode_impl.specialized.emulation.elementary import exp, sigmoid
from decode_impl.specialized.emulation.projection import projection
from numerics.formats import bf16


def delta_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token on FP32 registers: decay, correct by k.S, add, read out.

    S: f32 [n, h, d(v), d(k)]; q, k, v, decay: f32 [n, h, d]; beta: f32 [n, h]. Returns (new S, o f32 [n, h, d]).
    """
    S = S * decay[..., None, :]
    u = (v - (S * k[..., None, :]).sum(-1)) * beta[..., None]
    S = torch.addcmul(S, u[..., None], k[..., None, :])
    return S, (S * q[..., None, :]).sum(-1)


def kda_step(*, slots: Tensor, delta: Callable[..., tuple[Tensor, Tensor]] = delta_rule, **inputs: Any) -> Tensor:
    """One token for every row, at slot `slots[i]`; rows of slot 0 are zero and write nothing. Returns bf16 [n, D].

    Shapes as in docs/ops.md. Part: `delta`, the recurrence.
    """
    return kda_verify(sources=slots, targets=slots[:, None], delta=delta, **inputs)


def kda_verify(
    *,
    proj: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    sources: Tensor,
    targets: Tensor,
    delta: Callable[..., tuple[Tensor, Tensor]] = delta_rule,
) -> Tensor:
    """`w` tokens of every request, from slot `sources[i]`; the state after token j goes to slot `targets[i, j]`.

    Shapes as in docs/ops.md; the state stays in registers between the tokens. Part: `delta`, the recurrence of one.
    """
    heads, head_dim, width = state.shape[1], state.shape[-1], targets.shape[1]
    y = proj.new_zeros(sources.shape[0], width, heads * head_dim)
    live = sources.nonzero().squeeze(-1)
    if not heads or not live.numel():
        return y.flatten(0, 1)
    size = heads * head_dim
    qkv, gate, f_a, beta_raw = proj.split([3 * size, size, head_dim, heads], dim=-1)
    decay_input = projection(x=f_a, weight=f_b)
    qkv, gate, beta_raw, decay_input = (x.unflatten(0, (-1, width))[live] for x in (qkv, gate, beta_raw, decay_input))

    history = torch.cat([conv_state[sources[live]], qkv.mT], dim=-1)
    taps = conv_weight.shape[1]
    S, written = state.index_select(0, sources[live]).float(), targets[live]
    for j in range(width):
        window = history[..., j : j + taps]
        conv = _four_taps(window.float(), conv_weight)
        q, k, v = (conv * sigmoid(conv)).view(-1, 3, heads, head_dim).unbind(1)
        q = q * ((q * q).sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt() * head_dim**-0.5
        k = k * ((k * k).sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()

        g = (decay_input[:, j].float() + dt_bias.float()).view(-1, heads, head_dim)
        decay = exp(lower_bound * sigmoid(exp(A_log)[:, None] * g))
        S, o = delta(S, q, k, v, decay, sigmoid(beta_raw[:, j].float()))
        conv_state.index_copy_(0, written[:, j], window[..., 1:])
        state.index_copy_(0, written[:, j], S.to(state.dtype))
        y[live, j] = _gated_norm(o, gate[:, j].float(), norm_weight)
    return y.flatten(0, 1)


def _gated_norm(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    inverse = ((o * o).sum(-1, keepdim=True) * (1.0 / o.shape[-1]) + O_NORM_EPS).rsqrt()
    return bf16(o * inverse * weight.float() * sigmoid(gate).view_as(o)).flatten(1)


def _four_taps(window: Tensor, weight: Tensor) -> Tensor:
    total = window[..., 0] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total = torch.addcmul(total, window[..., tap], weight[:, tap])
    return total
