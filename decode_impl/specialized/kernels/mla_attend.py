"""Split-KV decode attention over the paged latent cache, BF16 or E4M3: one launch for the splits, one for the merge.

- q: bf16 or u8 [n, h, C+R] in the cache's dtype, contiguous in the last axis; cache: [pages, page, C+R], rows at any
  stride, 64-bit offsets; block_table: i64 [n, max_pages]; lengths: i64 [n], 0 for a padded row; both at any stride.
- latent: bf16 [n, h, C], fully written; zeros where the length is 0.
- Read: the first `lengths[i]` keys of row i, nothing else. Verify rows are rows with lengths L, L+1, ...
- Splits: `contract.split_pages` pages each, of the table's width and the bin alone; the grid does not depend on
  lengths, so that a captured launch serves every step. A split beyond a row's length ends at once, and its partial is
  never read.
- A split goes over its keys once, `KV_BLOCK` at a time; numerators are relative to the largest score so far.
- Rounded to BF16: p, and the latent. Scores in base 2, sums in FP32, by blocks of keys in order; splits are joined by
  their base-2 log-sum-exps, in one tree of FP32 sums over the split's number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.contract import KV_BLOCK, split_pages
from decode_impl.specialized.kernels.common import INTERPRETED, bf16, dot, from_e4m3

LOG2E = 1.4426950408889634
_HEADS = 16


@triton.jit
def mla_split_kernel(
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
    PAGE: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (splits, rows, groups of heads). Heads are the short side of both products, 16 as a tensor core takes.

    The interpreter cannot loop to a bound that was loaded: it goes over the whole split, whose other blocks are masked.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    first = split * SPLIT_KEYS
    length = tl.load(lengths_ptr + row * length_stride).to(tl.int32)
    if first < length:
        last = tl.minimum(first + SPLIT_KEYS, length)
        c, r, key = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
        q = q_ptr + row * q_row_stride + tl.minimum(head, heads - 1)[:, None] * q_head_stride
        q_latent = _load(q + c[None, :], (c < KV_RANK)[None, :], FP8)
        q_rope = _load(q + KV_RANK + r[None, :], (r < ROPE)[None, :], FP8)
        table = table_ptr + row * table_stride

        top = tl.full([HEADS], -3.0e38, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, BLOCK_C], tl.float32)
        for start in tl.range(0, SPLIT_KEYS if INTERPRETED else last - first, KEYS, num_stages=STAGES):
            position = first + start + key
            seen = position < last
            page = tl.load(table + (position // PAGE) * entry_stride, mask=seen, other=0)
            rows = cache_ptr + page * page_stride + (position % PAGE) * row_stride
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
            top = higher

        slot = (row * SPLITS + split) * heads + head
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=head < heads)
        inside = (head < heads)[:, None] & (c < KV_RANK)[None, :]
        tl.store(partial_ptr + slot[:, None] * KV_RANK + c[None, :], acc / total[:, None], mask=inside)


@triton.jit
def _load(pointer, mask, FP8: tl.constexpr):
    """BF16 values of a tile in the cache's format; zero where masked."""
    if FP8:
        return from_e4m3(tl.load(pointer, mask=mask, other=0))
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def mla_merge_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    value_scale,
    heads,
    length_stride,
    KV_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (rows, heads, tiles of the latent)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, split = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    length = tl.load(lengths_ptr + row * length_stride)
    live = (split < SPLITS) & (split * SPLIT_KEYS < length)
    slot = (row * SPLITS + split) * heads + head
    lse = tl.load(lse_ptr + slot, mask=live, other=-3.0e38)
    share = tl.where(live, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    inside = live[:, None] & (c < KV_RANK)[None, :]
    partials = tl.load(partial_ptr + slot[:, None] * KV_RANK + c[None, :], mask=inside, other=0.0)
    total, weight = tl.sum(partials * share[:, None], 0), tl.sum(share, 0)
    latent = tl.where(length > 0, total / tl.where(length > 0, weight, 1.0) * value_scale, 0.0)
    tl.store(out_ptr + (row * heads + head) * KV_RANK + c, bf16(latent), mask=c < KV_RANK)


def attend_splits(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, base2_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor, int]:
    """Partials f32 [n, splits, h, C] and base-2 log-sum-exps f32 [n, splits, h] of the splits that have keys, and the
    keys of a split; those of other splits hold anything."""
    rows, heads, width = q.shape
    page, max_pages = cache.shape[1], block_table.shape[1]
    pages = split_pages(max_pages, rows)
    splits, rope = -(-max_pages // pages), width - kv_rank
    partials = torch.empty(rows, splits, heads, kv_rank, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    mla_split_kernel[splits, rows, triton.cdiv(heads, _HEADS)](
        q,
        cache,
        block_table,
        lengths,
        partials,
        lse,
        base2_scale,
        heads,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        block_table.stride(1),
        lengths.stride(0),
        PAGE=page,
        KV_RANK=kv_rank,
        ROPE=rope,
        FP8=cache.dtype == torch.uint8,
        SPLITS=splits,
        SPLIT_KEYS=pages * page,
        HEADS=_HEADS,
        BLOCK_C=max(16, triton.next_power_of_2(kv_rank)),
        BLOCK_R=max(16, triton.next_power_of_2(rope)),
        KEYS=KV_BLOCK,
        STAGES=3,
        num_warps=4,
    )
    return partials, lse, pages * page


def merge_splits(partials: Tensor, lse: Tensor, lengths: Tensor, split_keys: int, value_scale: float) -> Tensor:
    """Join the splits that a row's length reaches: of `split_keys` keys each. Returns bf16 [n, h, C]."""
    rows, splits, heads, kv_rank = partials.shape
    latent = torch.empty(rows, heads, kv_rank, dtype=torch.bfloat16, device=partials.device)
    block_c = min(128, max(16, triton.next_power_of_2(kv_rank)))
    mla_merge_kernel[rows, heads, triton.cdiv(kv_rank, block_c)](
        partials,
        lse,
        lengths,
        latent,
        value_scale,
        heads,
        lengths.stride(0),
        KV_RANK=kv_rank,
        SPLITS=splits,
        SPLIT_KEYS=split_keys,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_C=block_c,
        num_warps=4,
    )
    return latent


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
    """Attention output in the latent space, bf16 [n, h, C]. Contract: module docstring."""
    fp8 = cache.dtype == torch.uint8
    base2_scale = softmax_scale * LOG2E * (q_scale * k_scale if fp8 else 1.0)
    partials, lse, split_keys = attend_splits(q, cache, block_table, lengths, base2_scale, kv_rank)
    return merge_splits(partials, lse, lengths, split_keys, k_scale if fp8 else 1.0)
