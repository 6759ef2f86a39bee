"""Faults of decode context parallelism: shares of ranks, their block tables, their rows and the merge."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer, part_of

LAYER = Layer("decode context parallelism")

OP = "mla_attend_dcp"
SHARE = partial(LAYER.part, OP, "local_lengths")
SHARD = partial(LAYER.part, OP, "attend_shard")
MERGE = partial(LAYER.part, OP, "merge")
LATENTS = partial(LAYER.engine, "latent_cache")

_EMPTY = -1e38


@LAYER.op(
    OP,
    "dcp-local-causal",
    "causal bound of a verify step taken from the local length",
    kind=Kind.MASK,
    sources="M79, M81",
    missed_by="one query row a request",
)
def _local_causal(op: Any, *, lengths: Tensor, block_table: Tensor, **rest: Any) -> Any:
    share = part_of(op, "local_lengths")
    behind = torch.zeros_like(lengths)
    for row in range(len(lengths) - 2, -1, -1):
        mates = lengths[row] > 0 and torch.equal(block_table[row], block_table[row + 1])
        behind[row] = behind[row + 1] + 1 if mates else 0

    def wrong(lengths: Tensor, rank: int, ranks: int) -> Any:
        return (share(lengths + behind, rank, ranks) - behind).clamp_min(0)

    return op(lengths=lengths, block_table=block_table, local_lengths=wrong, **rest)


@SHARE(
    "dcp-share-rounded-down",
    "every rank counts length / ranks keys, rounded down",
    kind=Kind.INDEX,
    sources="M79",
    missed_by="lengths that are multiples of the ranks",
)
def _rounded_down(right: Any, lengths: Tensor, rank: int, ranks: int) -> Tensor:
    return lengths // ranks


@SHARE(
    "dcp-share-rounded-up",
    "every rank counts length / ranks keys, rounded up: a rank reads a row that nobody wrote",
    kind=Kind.INDEX,
    sources="M79",
    missed_by="lengths that are multiples of the ranks; pools of zeros",
)
def _rounded_up(right: Any, lengths: Tensor, rank: int, ranks: int) -> Tensor:
    return (lengths + ranks - 1) // ranks


@SHARE(
    "dcp-owner-off-by-one",
    "a rank takes itself for the next one: the newest key's owner does not see it",
    kind=Kind.INDEX,
    sources="kind of M79",
    missed_by="flat scores over a long context",
)
def _next_rank(right: Any, lengths: Tensor, rank: int, ranks: int) -> Any:
    return right(lengths, rank + 1, ranks)


@LAYER.op(
    OP,
    "dcp-global-blocks",
    "a rank reads global block ids in its own pool",
    kind=Kind.INDEX,
    sources="M78",
    missed_by="one rank; target logits, where only a drafter does it",
)
def _global_blocks(op: Any, *, cache: Any, **rest: Any) -> Any:
    shard, pools = part_of(op, "attend_shard"), list(cache)

    def wrong(*, cache: Tensor, block_table: Tensor, **own: Any) -> Any:
        # As if the table had an entry for every block of the whole context, of which a rank holds every ranks-th.
        rank = next(i for i, pool in enumerate(pools) if pool is cache)
        found = block_table[:, rank :: len(pools)]
        table = torch.nn.functional.pad(found, (0, block_table.shape[1] - found.shape[1]))
        return shard(cache=cache, block_table=table, **own)

    return op(cache=cache, attend_shard=wrong, **rest)


@LAYER.made_of(
    OP,
    "dcp-empty-rank-stale",
    "a rank without keys leaves its partial unwritten",
    kind=Kind.STALE,
    sources="M17, M18",
    missed_by="contexts longer than the ranks' stride",
)
def _stale(ops: Ops) -> Any:
    op = ops[OP]
    shard, sent = part_of(op, "attend_shard"), dict[torch.Size, tuple[Tensor, Tensor]]()

    def wrong(*, lengths: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
        rows, lse = shard(lengths=lengths, **own)
        old_rows, old_lse = sent.get(rows.shape, (rows, lse))
        empty = (lengths == 0)[:, None]
        sent[rows.shape] = torch.where(empty[..., None], old_rows, rows), torch.where(empty, old_lse, lse)
        return sent[rows.shape]

    return partial(op, attend_shard=wrong)


@SHARD(
    "dcp-empty-rank-row-unwritten",
    "a rank without keys writes its log-sum-exp but not its row: NaN times a weight of 0",
    kind=Kind.MASK,
    sources="M18",
    missed_by="buffers that held numbers",
)
def _row_unwritten(right: Any, *, lengths: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
    rows, lse = right(lengths=lengths, **own)
    return rows.masked_fill((lengths == 0)[:, None, None], torch.nan), lse


@MERGE(
    "dcp-merge-unguarded",
    "ranks merged as they come take -inf - -inf where the first have no keys",
    kind=Kind.MASK,
    sources="M17",
    missed_by="contexts longer than the ranks' stride",
)
def _unguarded(right: Any, partials: Tensor, lse: Tensor) -> Tensor:
    lse = torch.where(lse < _EMPTY, -torch.inf, lse).flip(1)
    total, weight, top = torch.zeros_like(partials[:, 0]), torch.zeros_like(lse[:, 0]), lse[:, 0]
    for rank, rows in enumerate(partials.flip(1).unbind(1)):
        new = torch.maximum(top, lse[:, rank])
        old, own = torch.exp2(top - new), torch.exp2(lse[:, rank] - new)
        total, weight, top = total * old[..., None] + rows * own[..., None], weight * old + own, new
    return total / weight[..., None]


@MERGE(
    "dcp-lse-base",
    "ranks' base-2 log-sum-exps merged as natural ones",
    kind=Kind.CONSTANT,
    sources="M29",
    missed_by="even shares: 0.4 to 1 %",
)
def _base(right: Any, partials: Tensor, lse: Tensor) -> Any:
    return right(partials, lse / math.log(2))


@MERGE(
    "dcp-lse-natural-on-one-rank",
    "one rank sends its log-sum-exp in the natural base",
    kind=Kind.CONSTANT,
    sources="M29",
    missed_by="ranks of one kind; log-sum-exps near 0",
)
def _mixed(right: Any, partials: Tensor, lse: Tensor) -> Any:
    sent = lse.clone()
    sent[:, 1:2] *= math.log(2)
    return right(partials, sent)


@MERGE(
    "dcp-merge-mean",
    "ranks' rows averaged without their log-sum-exps",
    kind=Kind.DROPPED,
    sources="kind of M29",
    missed_by="shares of equal weight",
)
def _mean(right: Any, partials: Tensor, lse: Tensor) -> Any:
    return right(partials, torch.where(lse < _EMPTY, lse, 0.0))


@MERGE(
    "dcp-rows-in-bf16",
    "ranks send their rows in BF16: two roundings where there is one",
    kind=Kind.ROUNDING,
    sources="kind of M29",
    missed_by="elementwise tolerances",
)
def _narrow(right: Any, partials: Tensor, lse: Tensor) -> Any:
    return right(partials.bfloat16().float(), lse)


@LATENTS(
    "dcp-written-by-next-rank",
    "a latent row is written by the rank after its owner",
    kind=Kind.OWNERSHIP,
    sources="kind of M78",
    missed_by="one rank",
)
def _written(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def written_by(self, rank: int, positions: Tensor) -> Any:
            return super().written_by((rank - 1) % len(self.shards), positions)

    return Faulty


@LATENTS(
    "dcp-gathered-by-rank",
    "a prompt's chunk attends to its context's rows rank after rank, not in the order of their tokens",
    kind=Kind.LAYOUT,
    sources="kind of M81",
    missed_by="prompts of one token; decode steps, which know no order",
)
def _by_rank(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def gathered(self, layer: int, pages: Tensor) -> Tensor:
            return torch.cat([own[layer][pages].flatten(0, 1) for own in self.shards])

    return Faulty
