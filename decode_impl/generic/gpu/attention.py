"""Decode attention over the paged latent cache: one launch for the splits of the keys, one that merges them.

- Arguments and contract are the plain op's (`generic/mla.py`): keys beyond a row's length, and pages beyond its last,
  are never read. The number of splits is a function of the table's width and the rows, so a step can be captured.
- Only the latent is rounded: a numerator goes into its product as two BF16 parts, which hold 17 of its bits.
- Scratch: FP32 partial latents [n, splits, h, C] and their base-2 log-sum-exps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import INTERPRETED, MULTIPROCESSORS, bf16, dot, f32, from_e4m3

_LOG2E = 1.4426950408889634
_HEADS = 16
_KEYS = 32
_LEAST_KEYS = 256
"""Keys of the shortest split: below that merging costs more than it saves."""


@triton.jit
def _load(pointer, mask, FP8: tl.constexpr):
    """BF16 values of a tile in the cache's format; zero where masked."""
    if FP8:
        return from_e4m3(tl.load(pointer, mask=mask, other=0))
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def split_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,
    lse_ptr,
    base2_scale,
    heads,
    q_row_stride,
    q_head_stride,
    page_stride,
    row_stride,
    table_stride,
    entry_stride,
    length_stride,
    splits,
    SPLIT_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (splits, rows, groups of heads). The interpreter cannot loop to a bound that was loaded."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    length = tl.load(lengths_ptr + row * length_stride).to(tl.int32)
    first = split * SPLIT_KEYS
    if first < length:
        last = tl.minimum(first + SPLIT_KEYS, length)
        c, r, key = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
        q = q_ptr + row * q_row_stride + tl.minimum(head, heads - 1)[:, None] * q_head_stride
        q_latent = _load(q + c[None, :], (c < KV_RANK)[None, :], FP8)
        q_rope = _load(q + KV_RANK + r[None, :], (r < ROPE)[None, :], FP8)
        top = tl.full([HEADS], -3.0e38, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, BLOCK_C], tl.float32)
        for start in tl.range(0, SPLIT_KEYS if INTERPRETED else last - first, KEYS, num_stages=2):
            position = first + start + key
            seen = position < last
            page = tl.load(table_ptr + row * table_stride + position // PAGE * entry_stride, mask=seen, other=0)
            rows = cache_ptr + page * page_stride + position % PAGE * row_stride
            latent = _load(rows[:, None] + c[None, :], seen[:, None] & (c < KV_RANK)[None, :], FP8)
            rope = _load(rows[:, None] + KV_RANK + r[None, :], seen[:, None] & (r < ROPE)[None, :], FP8)
            scores = dot(q_rope, tl.trans(rope), tl.zeros([HEADS, KEYS], tl.float32))
            scores = dot(q_latent, tl.trans(latent), scores) * base2_scale
            scores = tl.where(seen[None, :], scores, -3.0e38)
            higher = tl.maximum(top, tl.max(scores, 1))
            p = tl.where(seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(p, 1)
            acc = dot(bf16(p), latent, acc * rescale[:, None])
            acc = dot(bf16(p - f32(bf16(p))), latent, acc)
            top = higher
        slot = (row * splits + split) * heads + head
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=head < heads)
        inside = (head < heads)[:, None] & (c < KV_RANK)[None, :]
        tl.store(partial_ptr + slot[:, None] * KV_RANK + c[None, :], acc / total[:, None], mask=inside)


@triton.jit
def merge_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    value_scale,
    heads,
    length_stride,
    splits,
    split_keys,
    KV_RANK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (rows, heads, tiles of the latent)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, c = tl.arange(0, BLOCK_S), tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    length = tl.load(lengths_ptr + row * length_stride)
    live = (split < splits) & (split * split_keys < length)
    slot = (row * splits + split) * heads + head
    lse = tl.load(lse_ptr + slot, mask=live, other=-3.0e38)
    share = tl.where(live, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    inside = live[:, None] & (c < KV_RANK)[None, :]
    partials = tl.load(partial_ptr + slot[:, None] * KV_RANK + c[None, :], mask=inside, other=0.0)
    total, weight = tl.sum(partials * share[:, None], 0), tl.sum(share, 0)
    latent = tl.where(length > 0, total / tl.where(length > 0, weight, 1.0) * value_scale, 0.0)
    tl.store(out_ptr + (row * heads + head) * KV_RANK + c, bf16(latent), mask=c < KV_RANK)


def mla_attend(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    q_scale: float,
    k_scale: float,
    kv_rank: int,
) -> Tensor:
    """One query row per request over its pages. Returns bf16 [n, h, C]; zeros where the length is 0."""
    rows, heads, width = q.shape
    latent = torch.empty(rows, heads, kv_rank, dtype=torch.bfloat16, device=q.device)
    if not latent.numel():
        return latent
    fp8, page, most = cache.dtype == torch.uint8, cache.shape[1], block_table.shape[1] * cache.shape[1]
    wanted = max(1, 2 * MULTIPROCESSORS // (rows * triton.cdiv(heads, _HEADS)))
    split_keys = max(_LEAST_KEYS, triton.cdiv(triton.cdiv(most, wanted), _KEYS) * _KEYS)
    splits = max(1, triton.cdiv(most, split_keys))
    partials = torch.empty(rows, splits, heads, kv_rank, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    block_c = max(16, triton.next_power_of_2(kv_rank))
    split_kernel[splits, rows, triton.cdiv(heads, _HEADS)](
        q, cache, block_table, lengths, partials, lse,
        softmax_scale * _LOG2E * (q_scale * k_scale if fp8 else 1.0), heads, q.stride(0), q.stride(1),
        cache.stride(0), cache.stride(1), block_table.stride(0), block_table.stride(1), lengths.stride(0), splits,
        SPLIT_KEYS=split_keys, PAGE=page, KV_RANK=kv_rank, ROPE=width - kv_rank, FP8=fp8, HEADS=_HEADS, KEYS=_KEYS,
        BLOCK_C=block_c, BLOCK_R=max(16, triton.next_power_of_2(width - kv_rank)), num_warps=4,
    )  # fmt: skip
    tile = min(128, block_c)
    merge_kernel[rows, heads, triton.cdiv(kv_rank, tile)](
        partials, lse, lengths, latent, k_scale if fp8 else 1.0, heads, lengths.stride(0), splits, split_keys,
        KV_RANK=kv_rank, BLOCK_S=triton.next_power_of_2(splits), BLOCK_C=tile, num_warps=4,
    )  # fmt: skip
    return latent
