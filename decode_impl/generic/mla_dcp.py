"""Attention over a context that is sharded over ranks, generic path: one partial a rank, merged in rank order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode_impl.generic.mla import scale_product, widen
from decode_impl.parallel.context import EMPTY, local_lengths, merge
from numerics.formats import bf16


def attend_shard(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    kv_rank: int,
) -> tuple[Tensor, Tensor]:
    """Attention of all heads over one rank's keys, normalised, with its base-2 log-sum-exp.

    q: [n, h, C+R] and cache as stored; lengths: i64 [n], of this rank. Returns f32 [n, h, C] and [n, h]; a row without
    keys has zeros and `EMPTY`.
    """
    pages = max(1, -(-int(lengths.max()) // cache.shape[1]))
    keys = widen(cache[block_table[:, :pages]]).flatten(1, 2)
    unseen = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    scores = (widen(q) @ keys.transpose(-1, -2) * scale).masked_fill(unseen[:, None], EMPTY)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top).masked_fill(unseen[:, None], 0.0)
    total = p.sum(-1)
    # A masked row may hold anything, NaN included: it is removed, not multiplied by zero.
    rows = p @ keys[..., :kv_rank].masked_fill(unseen[..., None], 0.0) / total[..., None]
    empty = (lengths == 0)[:, None]
    lse = (top.squeeze(-1) + total.log()) / math.log(2)
    return rows.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, EMPTY)


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
    scale = softmax_scale * scale_product(cache[0], q_scale, k_scale)
    shards = [
        attend_shard(
            q=q,
            cache=own,
            block_table=block_table,
            lengths=local_lengths(lengths, rank, len(cache)),
            scale=scale,
            kv_rank=kv_rank,
        )
        for rank, own in enumerate(cache)
    ]
    rows, lse = (torch.stack(list(part), dim=1) for part in zip(*shards, strict=True))
    latent = bf16(merge(rows, lse) * scale_product(cache[0], k_scale))
    return latent.masked_fill((lengths == 0)[:, None, None], 0.0)
