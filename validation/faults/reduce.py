"""Faults of sums over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer

LAYER = Layer("sums over ranks")

REDUCE = partial(LAYER.op, "all_reduce")
MIX = partial(LAYER.op, "output_mix")
TAIL = partial(LAYER.op, "moe_tail")


def bf16_sum(parts: list[Tensor]) -> Tensor:
    """Ranks added in order, every partial sum rounded to BF16."""
    total = parts[0]
    for part in parts[1:]:
        total = bf16(total.float() + part.float())
    return total


def mixed_by(ops: Ops, reduce: Any) -> Any:
    """`output_mix` out of the path's own ops, with another all-reduce in the middle."""

    def output_mix(*, y: Any, weight: Any, replace_prefix: bool, prefix: Tensor, **rest: Any) -> Any:
        attention = reduce([ops["projection"](x=x, weight=w) for x, w in zip(y, weight, strict=True)])
        if replace_prefix:
            return ops["attn_res"](prefix=attention, delta=None, **rest)
        return ops["attn_res"](prefix=prefix, delta=attention, **rest)

    return output_mix


@LAYER.made_of(
    "output_mix",
    "reduce-bf16-in-mix",
    "all-reduce inside the output mix accumulates in BF16",
    kind=Kind.REDUCTION,
    sources="F: BF16 accumulate",
    missed_by="two ranks; tolerances of a per cent",
)
def _mix_bf16(ops: Ops) -> Any:
    return mixed_by(ops, bf16_sum)


@REDUCE(
    "reduce-bf16",
    "all-reduce accumulates in BF16",
    kind=Kind.REDUCTION,
    sources="F: BF16 accumulate",
    missed_by="two ranks",
)
def _reduce_bf16(op: Any, *, y: Any) -> Tensor:
    return bf16_sum(list(y))


@TAIL(
    "reduce-bf16-in-tail",
    "latent all-reduce of the tail accumulates in BF16",
    kind=Kind.REDUCTION,
    sources="F: BF16 accumulate",
    missed_by="two ranks",
)
def _tail_bf16(op: Any, *, latent: Any, **rest: Any) -> Any:
    return op(latent=[bf16_sum(list(latent))], **rest)


@LAYER.made_of(
    "output_mix",
    "reduce-stale-rank",
    "the last rank's partial is the previous call's",
    kind=Kind.STALE,
    sources="M98, M100",
    missed_by="replays with constant inputs; cosine 0.9975",
)
def _stale(ops: Ops) -> Any:
    mix = ops["output_mix"]
    previous: dict[torch.Size, Tensor] = {}

    def faulty(*, y: Any, **rest: Any) -> Any:
        last = y[-1].clone()
        stale = previous.get(last.shape, torch.zeros_like(last))
        previous[last.shape] = last
        return mix(y=[*y[:-1], stale], **rest)

    return faulty


@LAYER.made_of(
    "all_reduce",
    "reduce-stale-slice",
    "one eighth of the last rank's partial is the previous call's",
    kind=Kind.STALE,
    sources="M100",
    missed_by="cosine 0.9997",
)
def _slice(ops: Ops) -> Any:
    reduce = ops["all_reduce"]
    previous: dict[torch.Size, Tensor] = {}

    def faulty(*, y: Any) -> Any:
        last = y[-1].clone()
        old = previous.get(last.shape, torch.zeros_like(last))
        previous[last.shape] = last.clone()
        last[:, : last.shape[1] // 8] = old[:, : last.shape[1] // 8]
        return reduce(y=[*y[:-1], last])

    return faulty


@REDUCE(
    "reduce-rank-twice-at-16",
    "with 16 ranks one is summed twice",
    kind=Kind.ONE_BIN,
    sources="M44",
    missed_by="up to 8 ranks",
)
def _twice(op: Any, *, y: Any) -> Any:
    return op(y=[*y, y[0]] if len(y) == 16 else y)


@TAIL(
    "reduce-rank-missing",
    "the last rank's latent is left out",
    kind=Kind.INDEX,
    sources="kind of M103",
    missed_by="one rank",
)
def _missing(op: Any, *, latent: Any, **rest: Any) -> Any:
    return op(latent=list(latent)[: max(1, len(latent) - 1)], **rest)


@TAIL(
    "moe-shared-on-every-rank",
    "shared expert added on every rank before the reduce: R + n S",
    kind=Kind.REDUCTION,
    sources="M44",
    missed_by="one rank",
)
def _shared(op: Any, *, shared: Any, **rest: Any) -> Any:
    return op(shared=[s for s in shared for _ in shared], **rest)


@TAIL(
    "moe-shared-dropped",
    "shared expert left out",
    kind=Kind.DROPPED,
    sources="kind of M44",
    missed_by="the routed part alone",
)
def _no_shared(op: Any, *, shared: Any, **rest: Any) -> Any:
    return op(shared=[torch.zeros_like(s) for s in shared], **rest)


@TAIL(
    "moe-tail-eps",
    "epsilon of the latent norm 1e-3 instead of 1e-5",
    kind=Kind.CONSTANT,
    sources="M82",
    missed_by="latents of ordinary size",
)
def _eps(op: Any, *, eps: float, **rest: Any) -> Any:
    return op(eps=1e-3, **rest)


@TAIL(
    "moe-latent-factor-before-norm",
    "routed latent multiplied by a constant in front of its norm",
    kind=Kind.SCALE,
    sources="F: factor applied twice",
    missed_by="logits: the norm behind it takes a common factor out, up to its epsilon (1e-5)",
)
def _factor(op: Any, *, latent: Any, **rest: Any) -> Any:
    return op(latent=[bf16(part.float() * 2.0) for part in latent], **rest)


@REDUCE(
    "reduce-negative-zero",
    "a partial of -0 is taken for data that has not arrived",
    kind=Kind.RACE,
    sources="F: -0.0 sentinel",
    missed_by="payloads without -0 and subnormals",
)
def _sentinel(op: Any, *, y: Any) -> Any:
    def arrived(x: Tensor) -> Tensor:
        return torch.where((x == 0) & x.signbit(), torch.full_like(x, 1.0), x)

    return op(y=[arrived(part) for part in y])


@REDUCE(
    "reduce-nan-of-a-rank-hidden",
    "a NaN of any rank but the first, taken for a slot that is not written yet, counts as zero",
    kind=Kind.MASK,
    sources="kind of M22",
    missed_by="rows that are NaN on all ranks",
)
def _nan_hidden(op: Any, *, y: Any) -> Any:
    return op(y=[y[0], *(part.nan_to_num() for part in y[1:])])


@REDUCE(
    "reduce-stride-of-first-rank",
    "rows of every rank are read at the stride of the first one's",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="ranks with buffers alike",
)
def _first_stride(op: Any, *, y: Any) -> Any:
    return op(y=[part.as_strided(part.shape, y[0].stride(), part.storage_offset()) for part in y])
