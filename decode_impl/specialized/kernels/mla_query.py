"""The MLA query front: both norms and the cache row; q_b; W_UK absorb and the (quantised) query row. Three launches.

- a: bf16 [n, q_rank + C + R] = q_c | kv_c | k_pe, rows at any stride; norm weights bf16;
  q_b: bf16 [h*(nope+R), q_rank]; w_uk: bf16 [h, nope, C]; positions: i64 [n] at any stride.
- cache: bf16 or u8 (E4M3) [pages, page, C+R], rows at any stride, 64-bit offsets. Row `positions[i]` is written with
  `[kv_n | k_pe]`; positions inside page 0 are null and write nothing.
- q: bf16 or u8 [n, h, C+R] = `[q_nope @ w_uk | q_rope]` per head, fully written, null rows too.
- Rounded to BF16: q_n, kv_n, q, absorbed. FP8: then `e4m3(x * (1/scale))`, saturating.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.kernels.common import aligned, bf16, dot, f32, padded_rows, to_e4m3
from decode_impl.specialized.kernels.norms import norm_warps, normalised
from decode_impl.specialized.kernels.projection import projection


@triton.jit
def mla_norms_kernel(
    a_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    positions_ptr,
    q_n_ptr,
    cache_ptr,
    eps,
    inverse_scale,
    a_stride,
    page_stride,
    row_stride,
    position_stride,
    page,
    q_rank,
    kv_rank,
    rope,
    FP8: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (rows, 2): the query latent of a row, or its cache row."""
    row = tl.program_id(0).to(tl.int64)
    a = a_ptr + row * a_stride
    if tl.program_id(1) == 0:
        i = tl.arange(0, BLOCK_Q)
        x = f32(tl.load(a + i, mask=i < q_rank, other=0.0))
        weight = f32(tl.load(q_weight_ptr + i, mask=i < q_rank, other=0.0))
        tl.store(q_n_ptr + row * q_rank + i, normalised(x, weight, eps, q_rank), mask=i < q_rank)
    else:
        position = tl.load(positions_ptr + row * position_stride)
        if position >= page:
            to = cache_ptr + position // page * page_stride + position % page * row_stride
            i, r = tl.arange(0, BLOCK_KV), tl.arange(0, BLOCK_R)
            x = f32(tl.load(a + q_rank + i, mask=i < kv_rank, other=0.0))
            weight = f32(tl.load(kv_weight_ptr + i, mask=i < kv_rank, other=0.0))
            latent = normalised(x, weight, eps, kv_rank)
            k_pe = tl.load(a + q_rank + kv_rank + r, mask=r < rope, other=0.0)
            _store(to + i, latent, inverse_scale, i < kv_rank, FP8)
            _store(to + kv_rank + r, k_pe, inverse_scale, r < rope, FP8)


@triton.jit
def _store(pointer, x, inverse_scale, mask, FP8: tl.constexpr):
    """Store BF16 values in the cache's format."""
    if FP8:
        tl.store(pointer, to_e4m3(f32(x) * inverse_scale), mask=mask)
    else:
        tl.store(pointer, x, mask=mask)


@triton.jit
def mla_absorb_kernel(
    q_ptr,
    w_uk_ptr,
    out_ptr,
    inverse_scale,
    rows,
    heads,
    nope,
    kv_rank,
    rope,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (heads, tiles of C, and one more that copies the rope part)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    width = kv_rank + rope
    q = q_ptr + (tl.minimum(row, rows - 1) * heads + head)[:, None] * (nope + rope)
    out = out_ptr + (row.to(tl.int64) * heads + head)[:, None] * width
    if tile * BLOCK_C < kv_rank:
        p, c = tl.arange(0, BLOCK_P), tile * BLOCK_C + tl.arange(0, BLOCK_C)
        q_nope = tl.load(q + p[None, :], mask=p[None, :] < nope, other=0.0)
        inside = (p[:, None] < nope) & (c[None, :] < kv_rank)
        w_uk = tl.load(w_uk_ptr + (head * nope + p)[:, None] * kv_rank + c[None, :], mask=inside, other=0.0)
        absorbed = bf16(dot(q_nope, w_uk, tl.zeros([ROWS, BLOCK_C], tl.float32)))
        _store(out + c[None, :], absorbed, inverse_scale, (row[:, None] < rows) & (c[None, :] < kv_rank), FP8)
    else:
        r = tl.arange(0, BLOCK_R)
        q_rope = tl.load(q + nope + r[None, :], mask=r[None, :] < rope, other=0.0)
        _store(out + kv_rank + r[None, :], q_rope, inverse_scale, (row[:, None] < rows) & (r[None, :] < rope), FP8)


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
    """The query row in the cache's dtype, [n, h, C+R]; writes the cache row. Contract: module docstring."""
    a, (heads, nope, kv_rank) = aligned(a), w_uk.shape
    rows, width = a.shape[0], cache.shape[-1]
    q_rank, rope, fp8 = a.shape[1] - width, width - kv_rank, cache.dtype == torch.uint8
    q_n = torch.empty(rows, q_rank, dtype=torch.bfloat16, device=a.device)
    block_q = triton.next_power_of_2(q_rank)
    mla_norms_kernel[rows, 2](
        a,
        q_norm_weight,
        kv_norm_weight,
        positions,
        q_n,
        cache,
        eps,
        1.0 / k_scale,
        a.stride(0),
        cache.stride(0),
        cache.stride(1),
        positions.stride(0),
        cache.shape[1],
        q_rank,
        kv_rank,
        rope,
        FP8=fp8,
        BLOCK_Q=block_q,
        BLOCK_KV=triton.next_power_of_2(kv_rank),
        BLOCK_R=triton.next_power_of_2(rope),
        num_warps=norm_warps(block_q),
    )
    out = torch.empty(rows, heads, width, dtype=cache.dtype, device=a.device)
    if not heads:
        return out  # a rank without heads still holds its share of the context
    q = projection(x=q_n, weight=q_b)
    block_c = min(64, triton.next_power_of_2(kv_rank))
    mla_absorb_kernel[heads, triton.cdiv(kv_rank, block_c) + 1](
        q,
        w_uk,
        out,
        1.0 / q_scale,
        rows,
        heads,
        nope,
        kv_rank,
        rope,
        FP8=fp8,
        ROWS=padded_rows(batch_bin(rows)),
        BLOCK_P=max(16, triton.next_power_of_2(nope)),
        BLOCK_C=block_c,
        BLOCK_R=triton.next_power_of_2(rope),
        num_warps=4,
    )
    return out
