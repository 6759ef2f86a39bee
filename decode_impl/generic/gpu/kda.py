"""The KDA core in three launches after the f_b product: convolution, gates with the delta rule, gated norm.

- Arguments and contract are the plain op's (`generic/kda.py`); slots, sources and targets are read on the device, so a
  step can be captured. A null request (source 0) gives zeros, and reads and writes no slot.
- Rounded to BF16: g1, the convolution's output, o and y, as there. Everything else is FP32.
- Scratch: conv bf16 [n*w, 3D] and o bf16 [n*w, D]; rows of null requests stay unwritten and are never read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS
from decode_impl.generic.gpu.linear import projection
from decode_impl.specialized.kernels.common import bf16, exp, f32, sigmoid

_VALUES = 16
"""Rows of a head's state that one CTA carries: a batch of one still gives 48 CTAs for six heads."""


@triton.jit
def conv_kernel(
    proj_ptr,
    weight_ptr,
    conv_ptr,
    sources_ptr,
    targets_ptr,
    out_ptr,
    channels,
    proj_stride,
    conv_stride,
    sources_stride,
    targets_stride,
    target_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (requests, tiles of 3D): four taps, oldest first, then silu; the window after each token to its slot."""
    request, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    source = tl.load(sources_ptr + request * sources_stride)
    if source > 0:
        window = conv_ptr + source * conv_stride + c * 3
        x0 = tl.load(window, mask=inside, other=0.0)
        x1 = tl.load(window + 1, mask=inside, other=0.0)
        x2 = tl.load(window + 2, mask=inside, other=0.0)
        w0 = tl.load(weight_ptr + c * 4, mask=inside, other=0.0)
        w1 = tl.load(weight_ptr + c * 4 + 1, mask=inside, other=0.0)
        w2 = tl.load(weight_ptr + c * 4 + 2, mask=inside, other=0.0)
        w3 = tl.load(weight_ptr + c * 4 + 3, mask=inside, other=0.0)
        for token in range(WIDTH):
            row = request * WIDTH + token
            x3 = tl.load(proj_ptr + row * proj_stride + c, mask=inside, other=0.0)
            y = f32(x0) * w0 + f32(x1) * w1 + f32(x2) * w2 + f32(x3) * w3
            tl.store(out_ptr + row * channels + c, bf16(y * sigmoid(y)), mask=inside)
            target = tl.load(targets_ptr + request * targets_stride + token * target_stride)
            window = conv_ptr + target * conv_stride + c * 3
            tl.store(window, x1, mask=inside)
            tl.store(window + 1, x2, mask=inside)
            tl.store(window + 2, x3, mask=inside)
            x0, x1, x2 = x1, x2, x3


@triton.jit
def delta_rule_kernel(
    proj_ptr,
    conv_ptr,
    g1_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    sources_ptr,
    targets_ptr,
    o_ptr,
    lower_bound,
    heads,
    proj_stride,
    state_stride,
    sources_stride,
    targets_stride,
    target_stride,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    VALUES: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Grid (heads, requests, tiles of d(v)): VALUES rows of a head's state through the request's tokens."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_channel, v_channel = tl.arange(0, D), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    source = tl.load(sources_ptr + request * sources_stride)
    if source > 0:
        size = heads * D
        cell = (head * D + v_channel[:, None]) * D + k_channel[None, :]
        S = f32(tl.load(state_ptr + source * state_stride + cell))
        slope = exp(f32(tl.load(a_log_ptr + head)))
        dt_bias = f32(tl.load(dt_bias_ptr + head * D + k_channel))
        for token in range(WIDTH):
            row = request * WIDTH + token
            conv = conv_ptr + row * 3 * size + head * D
            q = f32(tl.load(conv + k_channel))
            k = f32(tl.load(conv + size + k_channel))
            v = f32(tl.load(conv + 2 * size + v_channel))
            q = q * tl.rsqrt(tl.sum(q * q) + EPS) * SCALE
            k = k * tl.rsqrt(tl.sum(k * k) + EPS)
            g = f32(tl.load(g1_ptr + row * size + head * D + k_channel)) + dt_bias
            decay = exp(lower_bound * sigmoid(slope * g))
            beta = sigmoid(f32(tl.load(proj_ptr + row * proj_stride + 4 * size + D + head)))
            S = S * decay[None, :]
            u = (v - tl.sum(S * k[None, :], 1)) * beta
            S = S + u[:, None] * k[None, :]
            o = tl.sum(S * q[None, :], 1)
            tl.store(o_ptr + row * size + head * D + v_channel, bf16(o))
            target = tl.load(targets_ptr + request * targets_stride + token * target_stride)
            if state_ptr.dtype.element_ty == tl.bfloat16:
                stored = bf16(S)
                S = f32(stored)
                tl.store(state_ptr + target * state_stride + cell, stored)
            else:
                tl.store(state_ptr + target * state_stride + cell, S)


@triton.jit
def gated_norm_kernel(
    o_ptr,
    proj_ptr,
    weight_ptr,
    sources_ptr,
    y_ptr,
    eps,
    heads,
    proj_stride,
    sources_stride,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    size = heads * D
    live = tl.load(sources_ptr + row // WIDTH * sources_stride) > 0
    o = f32(tl.load(o_ptr + row * size + head * D + d, mask=(d < D) & live, other=0.0))
    gate = f32(tl.load(proj_ptr + row * proj_stride + 3 * size + head * D + d))
    y = o * tl.rsqrt(tl.sum(o * o) / D + eps) * f32(tl.load(weight_ptr + d)) * sigmoid(gate)
    tl.store(y_ptr + row * size + head * D + d, bf16(tl.where(live, y, 0.0)))


def kda_step(*, slots: Tensor, **inputs: Any) -> Tensor:
    """One token for every row: row i reads and writes slot `slots[i]`. Returns bf16 [n, D]."""
    return kda_verify(sources=slots, targets=slots[:, None], **inputs)


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
) -> Tensor:
    """`w` tokens of every request, the state after each in its own slot. Returns bf16 [n*w, D]."""
    requests, width = targets.shape
    heads, d = state.shape[1], state.shape[-1]
    size, rows = heads * d, requests * width
    y = torch.empty(rows, size, dtype=torch.bfloat16, device=proj.device)
    if not y.numel():
        return y
    conv = torch.empty(rows, 3 * size, dtype=torch.bfloat16, device=proj.device)
    o = torch.empty_like(y)
    block = min(256, triton.next_power_of_2(3 * size))
    slots = (sources.stride(0), targets.stride(0), targets.stride(1))
    conv_kernel[requests, triton.cdiv(3 * size, block)](
        proj, conv_weight, conv_state, sources, targets, conv, 3 * size, proj.stride(0), conv_state.stride(0), *slots,
        WIDTH=width, BLOCK=block, num_warps=2,
    )  # fmt: skip
    g1 = projection(x=proj[:, 4 * size : 4 * size + d], weight=f_b)
    values = min(_VALUES, d)
    delta_rule_kernel[heads, requests, d // values](
        proj, conv, g1, A_log, dt_bias, state, sources, targets, o, lower_bound, heads, proj.stride(0),
        state.stride(0), *slots, WIDTH=width, D=d, VALUES=values, EPS=L2_NORM_EPS, SCALE=d**-0.5, num_warps=2,
    )  # fmt: skip
    gated_norm_kernel[rows, heads](
        o, proj, norm_weight, sources, y, O_NORM_EPS, heads, proj.stride(0), sources.stride(0), WIDTH=width, D=d,
        num_warps=1,
    )  # fmt: skip
    return y
