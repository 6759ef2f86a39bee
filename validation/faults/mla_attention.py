"""Faults of multi-head latent attention: softmax, splits and their merge, masks, pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults import kernels
from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer

LAYER = Layer("MLA attention")

ATTEND = partial(LAYER.op, "mla_attend")
MERGE = partial(LAYER.part, "mla_attend", "merge")

_EMPTY = -1e38


def _weighted(partials: Tensor, weights: Tensor) -> Tensor:
    return (partials * weights[..., None]).sum(1) / weights.sum(1)[..., None]


@MERGE(
    "mla-lse-base",
    "base-2 log-sum-exps merged as natural ones",
    kind=Kind.CONSTANT,
    sources="M29",
    missed_by="splits of equal length: 0.4 to 1.4 %",
)
def _base(right: Any, partials: Tensor, lse: Tensor) -> Tensor:
    return _weighted(partials, torch.exp(lse - lse.amax(1, keepdim=True)))


@MERGE(
    "mla-empty-split-merged",
    "a split without keys still stores a partial",
    kind=Kind.STALE,
    sources="M16",
    missed_by="batches of equal lengths",
)
def _stale_split(right: Any, partials: Tensor, lse: Tensor) -> Any:
    empty = lse < _EMPTY
    stale = torch.where(empty[..., None], partials[:, :1].roll(1, 0), partials)
    return right(stale, torch.where(empty, lse[:, :1] - 2.0, lse))


@MERGE(
    "mla-merge-unguarded",
    "online merge takes -inf - -inf where leading splits are empty",
    kind=Kind.MASK,
    sources="M17",
    missed_by="a first split that is never empty",
)
def _unguarded(right: Any, partials: Tensor, lse: Tensor) -> Tensor:
    lse = torch.where(lse < _EMPTY, -torch.inf, lse)
    total, weight, top = (
        torch.zeros_like(partials[:, 0]),
        torch.zeros_like(lse[:, 0]),
        torch.full_like(lse[:, 0], -torch.inf),
    )
    for split in reversed(range(partials.shape[1])):
        new = torch.maximum(top, lse[:, split])
        old_scale, scale = torch.exp2(top - new), torch.exp2(lse[:, split] - new)
        total = total * old_scale[..., None] + partials[:, split] * scale[..., None]
        weight, top = weight * old_scale + scale, new
    return total / weight[..., None]


@MERGE(
    "mla-merge-mean",
    "partials averaged without their log-sum-exps",
    kind=Kind.DROPPED,
    sources="kind of M29",
    missed_by="splits of equal weight",
)
def _mean(right: Any, partials: Tensor, lse: Tensor) -> Tensor:
    return _weighted(partials, (lse >= _EMPTY).float().clamp_min(1e-30))


@ATTEND(
    "mla-softmax-no-max",
    "softmax without subtracting the largest score",
    kind=Kind.OVERFLOW,
    sources="kind of M17",
    missed_by="scores below 88",
)
def _no_max(op: Any, **case: Any) -> Tensor:
    return kernels.attend(case, softmax=lambda scores: scores.exp() / scores.exp().sum(-1, keepdim=True))


@ATTEND(
    "mla-last-key-forgotten",
    "the first key of a new page is not seen by its own token",
    kind=Kind.INDEX,
    sources="F: ctx%block==1",
    missed_by="flat scores over a long context (0.1 % at 131k)",
)
def _forgotten(op: Any, *, lengths: Tensor, cache: Tensor, **rest: Any) -> Any:
    starts_page = (lengths > 1) & (lengths % cache.shape[1] == 1)
    return op(lengths=lengths - starts_page.long(), cache=cache, **rest)


@ATTEND(
    "mla-first-key-skipped",
    "the first key of the context is never read",
    kind=Kind.INDEX,
    sources="kind of M79",
    missed_by="flat scores over a long context",
)
def _first(op: Any, **case: Any) -> Tensor:
    _, seen = kernels.gathered(case)
    return kernels.attend(case, seen=seen & ((torch.arange(seen.shape[1]) > 0) | (case["lengths"][:, None] < 2)))


@ATTEND(
    "mla-next-key-seen",
    "one key too many is seen",
    kind=Kind.INDEX,
    sources="M79",
    missed_by="caches filled with zeros",
)
def _next(op: Any, *, lengths: Tensor, block_table: Tensor, cache: Tensor, **rest: Any) -> Any:
    room = (block_table != 0).sum(1) * cache.shape[1]
    longer = torch.where(lengths > 0, torch.minimum(lengths + 1, room), lengths)
    return op(lengths=longer, block_table=block_table, cache=cache, **rest)


@ATTEND(
    "mla-page-13",
    "page table read one entry off from the fourteenth page on",
    kind=Kind.INDEX,
    sources="kind of M78",
    missed_by="contexts of up to thirteen pages",
)
def _late_page(op: Any, *, block_table: Tensor, **rest: Any) -> Any:
    table = block_table.clone()
    table[:, 13:] = block_table[:, 12:-1]
    return op(block_table=table, **rest)


@ATTEND(
    "mla-tail-not-masked",
    "values behind the last key are multiplied by zero, not removed",
    kind=Kind.MASK,
    sources="M20",
    missed_by="caches filled with zeros",
)
def _tail(op: Any, **case: Any) -> Tensor:
    return kernels.attend(case, zero_values=False)


@ATTEND(
    "mla-scratch-uninitialised",
    "keys gathered into scratch of whole tiles, of which only live rows are written",
    kind=Kind.MASK,
    sources="M21",
    missed_by="fresh processes, where scratch is zero",
)
def _scratch(op: Any, **case: Any) -> Tensor:
    keys, seen = kernels.gathered(case)
    # What was there before, the same everywhere: a number as a rule, and then the masked lanes hide it.
    scratch = keys.new_empty(1).expand(keys.shape).clone()
    scratch[seen] = keys[seen]
    return kernels.attend(case, keys=scratch, zero_values=False)


@LAYER.made_of(
    "mla_attend",
    "mla-null-row-not-written",
    "output of a row without keys not written: it keeps what the buffer held",
    kind=Kind.STALE,
    sources="M18",
    missed_by="outputs zeroed before the call",
)
def _not_written(ops: Ops) -> Any:
    attend = ops["mla_attend"]
    buffer: dict[torch.Size, Tensor] = {}

    def faulty(*, lengths: Tensor, **rest: Any) -> Any:
        latent = attend(lengths=lengths, **rest)
        old = buffer.get(latent.shape, torch.full_like(latent, torch.nan))
        buffer[latent.shape] = torch.where((lengths == 0)[:, None, None], old, latent)
        return buffer[latent.shape].clone()

    return faulty


@ATTEND(
    "mla-twelve-heads-zero",
    "the wrapper for 12 heads a rank has no kernel and returns zeros",
    kind=Kind.ONE_BIN,
    sources="M26",
    missed_by="every other head count",
)
def _twelve(op: Any, *, q: Tensor, **rest: Any) -> Any:
    latent = op(q=q, **rest)
    return torch.zeros_like(latent) if q.shape[1] == 12 else latent


@ATTEND(
    "mla-schedule-for-bf16",
    "split schedule built for rows of two bytes: every other page of an FP8 cache is not visited",
    kind=Kind.SCHEDULE,
    sources="M27",
    missed_by="BF16 caches; contexts of one page",
)
def _schedule(op: Any, **case: Any) -> Any:
    if case["cache"].dtype != torch.uint8:
        return op(**case)
    _, seen = kernels.gathered(case)
    page = torch.arange(seen.shape[1]) // case["cache"].shape[1]
    return kernels.attend(case, seen=seen & (page % 2 == 0))


@ATTEND(
    "mla-split-by-batch-mates",
    "split length follows from the longest request of the batch",
    kind=Kind.SCHEDULE,
    sources="M125",
    missed_by="re-runs of one batch; it flips near-ties only",
)
def _batch_mates(op: Any, *, block_table: Tensor, lengths: Tensor, cache: Tensor, **rest: Any) -> Any:
    pages = max(1, -(-int(lengths.max()) // cache.shape[1]))
    return op(block_table=block_table[:, :pages], lengths=lengths, cache=cache, **rest)


@ATTEND(
    "mla-scale-of-absorbed-width",
    "softmax scale taken from the absorbed width",
    kind=Kind.CONSTANT,
    sources="M28",
    missed_by="models whose widths agree",
)
def _absorbed(op: Any, *, softmax_scale: float, cache: Tensor, **rest: Any) -> Any:
    return op(softmax_scale=cache.shape[-1] ** -0.5, cache=cache, **rest)
