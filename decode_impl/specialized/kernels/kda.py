"""The KDA core, one kernel for decode and verify: f_b product, conv update, gates, l2norm, delta rule, gated norm.

A CTA owns one head of one request: its state, FP32 [d(v), d(k)], is read once into registers, carried through the
request's `w` tokens there, and written once per token to that token's slot.

- proj: bf16 [n*w, 4D+d+h] = q | k | v | g | f_a | beta, request by request, rows at any stride; f_b: bf16 [D, d];
  conv_weight: f32 [3D, 4], oldest tap first; A_log: f32 [h]; dt_bias: f32 [D]; norm_weight: bf16 [d].
- conv_state: bf16 [slots, 3D, 3]; state: f32 [slots, h, d, d]; inner axes adjacent, slots at any stride, offsets in 64
  bits.
- sources: i64 [n]; targets: i64 [n, w]. A request's targets may contain its source and belong to no other request.
- y: bf16 [n*w, D], fully written; a null request (source 0) gives zeros, and reads and writes no slot.
- Scratch: f32 [n*w, h, 5, d], written and read by the head's own CTA: what the recurrence needs of a token (q, k, v,
  decay, output gate) is computed with one channel a thread, and read back in the layout of the state, where it would
  be replicated over 32 lanes.
- Rounded to BF16: g1 = f_a @ f_b^T and y. Everything else is FP32. Sums over d are trees of a fixed shape, so that a
  row's bits depend on nothing but its own inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS
from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.kernels.common import MULTIPROCESSORS, bf16, exp, f32, sigmoid


@triton.jit
def kda_kernel(
    proj_ptr,
    f_b_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    conv_ptr,
    state_ptr,
    sources_ptr,
    targets_ptr,
    scratch_ptr,
    y_ptr,
    lower_bound,
    heads,
    proj_stride,
    conv_stride,
    state_stride,
    sources_stride,
    targets_stride,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    L2_EPS: tl.constexpr,
    O_EPS: tl.constexpr,
    SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (heads, requests). D is the head size."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    size = heads * D
    d = tl.arange(0, D)
    y = y_ptr + request * WIDTH * size + head * D + d
    source = tl.load(sources_ptr + request * sources_stride)
    if source <= 0:
        for token in range(WIDTH):
            tl.store(y + token * size, tl.zeros([D], tl.bfloat16))
    else:
        cell = (head * D + d[:, None]) * D + d[None, :]
        S = f32(tl.load(state_ptr + source * state_stride + cell))
        scratch = scratch_ptr + (request * WIDTH * heads + head) * (5 * D)

        part = tl.arange(0, 4)[:, None]  # q, k, v, nothing
        channel = part * size + head * D + d[None, :]
        used = part < 3
        taps = conv_weight_ptr + channel * 4
        window = conv_ptr + source * conv_stride + channel * 3
        x0 = tl.load(window, mask=used, other=0.0)
        x1 = tl.load(window + 1, mask=used, other=0.0)
        x2 = tl.load(window + 2, mask=used, other=0.0)
        w0 = tl.load(taps, mask=used, other=0.0)
        w1 = tl.load(taps + 1, mask=used, other=0.0)
        w2 = tl.load(taps + 2, mask=used, other=0.0)
        w3 = tl.load(taps + 3, mask=used, other=0.0)
        slope = exp(tl.load(a_log_ptr + head))
        dt_bias = f32(tl.load(dt_bias_ptr + head * D + d))
        weight = f32(tl.load(norm_weight_ptr + d))
        for token in range(WIDTH):
            row = proj_ptr + (request * WIDTH + token) * proj_stride
            to = scratch + token * heads * (5 * D)
            x3 = tl.load(row + channel, mask=used, other=0.0)
            c = f32(x0) * w0 + f32(x1) * w1 + f32(x2) * w2 + f32(x3) * w3
            c = c * sigmoid(c)
            inverse = tl.rsqrt(tl.sum(c * c, 1)[:, None] + L2_EPS)
            scale = tl.where(part == 0, inverse * SCALE, tl.where(part == 1, inverse, 1.0))
            tl.store(to + part * D + d[None, :], c * scale, mask=used)
            g = _decay_input(row + 4 * size, f_b_ptr + (head * D + d) * D, D, CHUNK) + dt_bias
            tl.store(to + 3 * D + d, exp(lower_bound * sigmoid(slope * g)))
            gate = f32(tl.load(row + 3 * size + head * D + d))
            tl.store(to + 4 * D + d, weight * sigmoid(gate))

            target = tl.load(targets_ptr + request * targets_stride + token)
            window = conv_ptr + target * conv_stride + channel * 3
            tl.store(window, x1, mask=used)
            tl.store(window + 1, x2, mask=used)
            tl.store(window + 2, x3, mask=used)
            x0, x1, x2 = x1, x2, x3
        tl.debug_barrier()

        for token in range(WIDTH):
            row = proj_ptr + (request * WIDTH + token) * proj_stride
            of = scratch + token * heads * (5 * D)
            beta = sigmoid(f32(tl.load(row + 4 * size + D + head)))
            k = tl.load(of + D + d)[None, :]
            S = S * tl.load(of + 3 * D + d)[None, :]
            u = (tl.load(of + 2 * D + d) - tl.sum(S * k, 1)) * beta
            S = S + u[:, None] * k
            target = tl.load(targets_ptr + request * targets_stride + token)
            tl.store(state_ptr + target * state_stride + cell, S.to(state_ptr.dtype.element_ty))
            o = tl.sum(S * tl.load(of + d)[None, :], 1)
            inverse = tl.rsqrt(tl.sum(o * o) * (1.0 / D) + O_EPS)
            tl.store(y + token * size, bf16(o * inverse * tl.load(of + 4 * D + d)))


@triton.jit
def _decay_input(f_a, f_b, D: tl.constexpr, CHUNK: tl.constexpr):
    """bf(f_b @ f_a) of one head, FP32 [D]; CHUNK columns at a time keep the tile in few registers."""
    c = tl.arange(0, CHUNK)
    acc = tl.zeros([D, CHUNK], tl.float32)
    for start in tl.range(0, D, CHUNK, num_stages=1, loop_unroll_factor=1):
        x = f32(tl.load(f_a + start + c))
        acc += f32(tl.load(f_b[:, None] + start + c[None, :])) * x[None, :]
    return f32(bf16(tl.sum(acc, 1)))


def _occupancy(heads: int, requests: int, width: int, head_dim: int) -> dict[str, int]:
    """Warps, register limit and columns of f_b at a time, by batch bin.

    A head has twice the threads where multiprocessors are plenty; where they are not, two heads share one, so that one
    loads while the other computes.
    """
    crowded = heads * batch_bin(requests * width) > width * MULTIPROCESSORS
    if crowded and width == 1:
        return {"num_warps": 8, "maxnreg": 128, "CHUNK": min(32, head_dim)}
    return {"num_warps": 16, "CHUNK": head_dim}


def kda_step(*, slots: Tensor, **inputs: Any) -> Tensor:
    """One token of every request, in its slot. Returns bf16 [n, D]. Contract: module docstring."""
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
    heads, head_dim = state.shape[1], state.shape[-1]
    y = torch.empty(requests * width, heads * head_dim, dtype=torch.bfloat16, device=proj.device)
    if not y.numel():
        return y
    scratch = torch.empty(requests * width, heads, 5, head_dim, dtype=torch.float32, device=proj.device)
    kda_kernel[heads, requests](
        proj,
        f_b,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        sources,
        targets,
        scratch,
        y,
        lower_bound,
        heads,
        proj.stride(0),
        conv_state.stride(0),
        state.stride(0),
        sources.stride(0),
        targets.stride(0),
        WIDTH=width,
        D=head_dim,
        L2_EPS=L2_NORM_EPS,
        O_EPS=O_NORM_EPS,
        SCALE=head_dim**-0.5,
        **_occupancy(heads, requests, width, head_dim),
    )
    return y
