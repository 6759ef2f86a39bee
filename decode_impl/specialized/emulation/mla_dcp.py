"""Emulated decode over a context that is sharded over ranks.

Every rank runs the split-KV kernel over its own pool for the heads of all ranks and joins its splits into one FP32 row
and base-2 log-sum-exp a head; the head's owner merges the rows of all ranks in rank order, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode_impl.parallel.context import local_lengths
from decode_impl.specialized.emulation.elementary import exp2, log2
from decode_impl.specialized.emulation.mla import LOG2E, attend_splits, merge
from numerics.formats import bf16


def attend_shard(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    base2_scale: float,
    kv_rank: int,
) -> tuple[Tensor, Tensor]:
    """One rank's share, f32 [n, h, C], and its base-2 log-sum-exp, f32 [n, h]; zeros and the sentinel without keys."""
    partials, lse = attend_splits(q, cache, block_table, lengths, base2_scale, kv_rank)
    top = lse.amax(1)
    return merge(partials, lse), top + log2(exp2(lse - top[:, None]).sum(1))


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
    local_lengths: Callable[[Tensor, int, int], Tensor] = local_lengths,
    attend_shard: Callable[..., tuple[Tensor, Tensor]] = attend_shard,
    merge: Callable[[Tensor, Tensor], Tensor] = merge,
) -> Tensor:
    """All ranks in lockstep. Shapes as in docs/ops.md. Parts: `local_lengths`, `attend_shard`, `merge`.

    Returns bf16 [n, h, C], heads in the order of `q`, which is that of their owners.
    """
    fp8 = q.dtype == torch.uint8
    shards = [
        attend_shard(
            q=q,
            cache=own,
            block_table=block_table,
            lengths=local_lengths(lengths, rank, len(cache)),
            base2_scale=softmax_scale * LOG2E * (q_scale * k_scale if fp8 else 1.0),
            kv_rank=kv_rank,
        )
        for rank, own in enumerate(cache)
    ]
    rows, lse = (torch.stack(list(part), dim=1) for part in zip(*shards, strict=True))
    latent = bf16(merge(rows, lse) * (k_scale if fp8 else 1.0))
    return latent.masked_fill((lengths == 0)[:, None, None], 0.0)
