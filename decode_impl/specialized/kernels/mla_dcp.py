"""Split-KV decode attention over a context that is sharded over ranks: `mla_attend` on every rank's pool, then a merge.

- q: the heads of all ranks, [n, h, C+R]; cache: one pool a rank; block_table and lengths as of `mla_attend`, for the
  whole context: a rank has every ranks-th token of it (`parallel/context.py`).
- A rank's splits are joined into one FP32 row and one base-2 log-sum-exp a head, what it would send to the head's
  owner; a rank without keys writes zeros and the sentinel. Ranks are joined as splits are, in one tree of FP32 sums,
  and rounded once. Rank r has keys of a row where its length is more than r, so that a rank is a "split" of one key.
- Ranks are virtual: their launches follow each other on one device, and none reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.parallel.context import local_lengths
from decode_impl.specialized.kernels.mla_attend import LOG2E, attend_splits, merge_splits


@triton.jit
def mla_rank_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    row_ptr,
    row_lse_ptr,
    heads,
    length_stride,
    row_stride,
    KV_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (rows, heads, tiles of the latent). `row_stride`: heads between two rows of this rank's output."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, split = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    length = tl.load(lengths_ptr + row * length_stride)
    live = (split < SPLITS) & (split * SPLIT_KEYS < length)
    slot = (row * SPLITS + split) * heads + head
    lse = tl.load(lse_ptr + slot, mask=live, other=-3.0e38)
    top = tl.max(lse, 0)
    share = tl.where(live, tl.exp2(lse - top), 0.0)
    inside = live[:, None] & (c < KV_RANK)[None, :]
    partials = tl.load(partial_ptr + slot[:, None] * KV_RANK + c[None, :], mask=inside, other=0.0)
    weight = tl.where(length > 0, tl.sum(share, 0), 1.0)
    place = row * row_stride + head
    tl.store(row_ptr + place * KV_RANK + c, tl.sum(partials * share[:, None], 0) / weight, mask=c < KV_RANK)
    if tl.program_id(2) == 0:
        tl.store(row_lse_ptr + place, top + tl.log2(weight))


def mla_attend_dcp(
    *,
    q: Tensor,
    cache: Sequence[Tensor],
    block_table: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    q_scale: float,
    k_scale: float,
    kv_rank: int,
) -> Tensor:
    """Attention output in the latent space, bf16 [n, h, C]. Contract: module docstring."""
    (rows, heads, _), ranks, fp8 = q.shape, len(cache), q.dtype == torch.uint8
    base2_scale = softmax_scale * LOG2E * (q_scale * k_scale if fp8 else 1.0)
    sent = torch.empty(rows, ranks, heads, kv_rank, dtype=torch.float32, device=q.device)
    sent_lse = torch.empty(rows, ranks, heads, dtype=torch.float32, device=q.device)
    block_c = min(128, max(16, triton.next_power_of_2(kv_rank)))
    for rank, own in enumerate(cache):
        held = local_lengths(lengths, rank, ranks)
        partials, lse, split_keys = attend_splits(q, own, block_table, held, base2_scale, kv_rank)
        mla_rank_kernel[rows, heads, triton.cdiv(kv_rank, block_c)](
            partials,
            lse,
            held,
            sent[:, rank],
            sent_lse[:, rank],
            heads,
            held.stride(0),
            ranks * heads,
            KV_RANK=kv_rank,
            SPLITS=partials.shape[1],
            SPLIT_KEYS=split_keys,
            BLOCK_S=triton.next_power_of_2(partials.shape[1]),
            BLOCK_C=block_c,
            num_warps=4,
        )
    return merge_splits(sent, sent_lse, lengths, 1, k_scale if fp8 else 1.0)
