"""MLA around the attention: cuBLAS for q_b, absorb and W_UV, one small kernel each for the cache row, the query row
and the gate.

- Arguments and contract are the plain op's (`generic/mla.py`). Positions are read on the device; those inside page 0
  are null and write nothing. Offsets into the cache have 64 bits.
- Rounded to BF16: q_n, kv_n, q, absorbed; value and y. FP8 rows are `e4m3(x * (1/scale))`, saturating.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.generic.gpu.linear import batched, projection, rms_norm
from decode_impl.specialized.kernels.common import bf16, f32, sigmoid, to_e4m3


@triton.jit
def _store(pointer, x, inverse_scale, mask, FP8: tl.constexpr):
    """Store BF16 values in the cache's format."""
    if FP8:
        tl.store(pointer, to_e4m3(f32(x) * inverse_scale), mask=mask)
    else:
        tl.store(pointer, x, mask=mask)


@triton.jit
def cache_row_kernel(
    a_ptr,
    weight_ptr,
    positions_ptr,
    cache_ptr,
    eps,
    inverse_scale,
    a_stride,
    position_stride,
    page_stride,
    row_stride,
    page,
    kv_rank,
    rope,
    FP8: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (rows,): normalise a latent and write `kv_n | k_pe` to its place."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row * position_stride)
    if position >= page:
        i, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
        x = f32(tl.load(a_ptr + row * a_stride + i, mask=i < kv_rank, other=0.0))
        weight = f32(tl.load(weight_ptr + i, mask=i < kv_rank, other=0.0))
        latent = bf16(x * tl.rsqrt(tl.sum(x * x) / kv_rank + eps) * weight)
        k_pe = tl.load(a_ptr + row * a_stride + kv_rank + r, mask=r < rope, other=0.0)
        to = cache_ptr + position // page * page_stride + position % page * row_stride
        _store(to + i, latent, inverse_scale, i < kv_rank, FP8)
        _store(to + kv_rank + r, k_pe, inverse_scale, r < rope, FP8)


@triton.jit
def query_row_kernel(
    absorbed_ptr,
    q_ptr,
    out_ptr,
    inverse_scale,
    rows,
    heads,
    nope,
    kv_rank,
    rope,
    FP8: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (rows, heads): `absorbed | q_rope` in the cache's format; absorbed lies head by head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    to = out_ptr + (row * heads + head) * (kv_rank + rope)
    absorbed = tl.load(absorbed_ptr + (head * rows + row) * kv_rank + i, mask=i < kv_rank, other=0.0)
    q_rope = tl.load(q_ptr + (row * heads + head) * (nope + rope) + nope + r, mask=r < rope, other=0.0)
    _store(to + i, absorbed, inverse_scale, i < kv_rank, FP8)
    _store(to + kv_rank + r, q_rope, inverse_scale, r < rope, FP8)


def mla_query(
    *,
    a: Tensor,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    eps: float,
    q_b: Tensor,
    w_uk: Tensor,
    q_scale: float,
    k_scale: float,
    cache: Tensor,
    positions: Tensor,
) -> Tensor:
    """Write the latent's cache row; expand and absorb the query. Returns [n, h, C+R] in the cache's dtype."""
    rows, (heads, nope, kv_rank) = len(a), w_uk.shape
    width = cache.shape[-1]
    rope, q_rank, fp8 = width - kv_rank, a.shape[-1] - width, cache.dtype == torch.uint8
    out = torch.empty(rows, heads, width, dtype=cache.dtype, device=a.device)
    if not rows:
        return out
    blocks = {"BLOCK_C": triton.next_power_of_2(kv_rank), "BLOCK_R": max(16, triton.next_power_of_2(rope))}
    cache_row_kernel[rows,](
        a[:, q_rank:], kv_norm_weight, positions, cache, eps, 1.0 / k_scale, a.stride(0), positions.stride(0),
        cache.stride(0), cache.stride(1), cache.shape[1], kv_rank, rope, FP8=fp8, num_warps=2, **blocks,
    )  # fmt: skip
    q = projection(x=rms_norm(x=a[:, :q_rank], weight=q_norm_weight, eps=eps), weight=q_b)
    absorbed = batched(q.unflatten(-1, (heads, -1))[..., :nope], w_uk)
    query_row_kernel[rows, heads](
        absorbed, q, out, 1.0 / q_scale, rows, heads, nope, kv_rank, rope, FP8=fp8, num_warps=2, **blocks
    )
    return out


@triton.jit
def gate_kernel(value_ptr, gate_ptr, y_ptr, rows, heads, gate_stride, width, BLOCK: tl.constexpr):
    """Grid (rows, heads): a head's values, which lie head by head, times the sigmoid of its gate."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < width
    value = f32(tl.load(value_ptr + (head * rows + row) * width + i, mask=inside, other=0.0))
    gate = f32(tl.load(gate_ptr + row * gate_stride + head * width + i, mask=inside, other=0.0))
    tl.store(y_ptr + (row * heads + head) * width + i, bf16(value * sigmoid(gate)), mask=inside)


def mla_value(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
    """Expand the latent to the value heads and gate it. Returns bf16 [n, h*v]."""
    rows, (heads, _, width) = len(latent), w_uv.shape
    y = torch.empty(rows, heads * width, dtype=torch.bfloat16, device=latent.device)
    if y.numel():
        block = triton.next_power_of_2(width)
        value = batched(latent, w_uv)
        gate_kernel[rows, heads](value, gate, y, rows, heads, gate.stride(0), width, BLOCK=block, num_warps=1)
    return y
