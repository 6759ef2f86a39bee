"""Faults of the router: its logits, the choice of experts and their weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("router")

ROUTE = partial(LAYER.op, "route")
FRONT = partial(LAYER.op, "moe_front")


def chosen(ranking: Tensor, scores: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Top-k of `ranking`, ties to the lower id, and weights from `scores`, f32."""
    ids = torch.sort(ranking, dim=-1, descending=True, stable=True).indices[:, :top_k]
    picked = scores.gather(-1, ids)
    return ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling


@ROUTE(
    "moe-logits-bf16",
    "router logits rounded to BF16 before the choice",
    kind=Kind.ROUNDING,
    sources="M33",
    missed_by="evals at high concurrency, cosine, one layer: 8 % of tokens change their set",
)
def _logits(op: Any, *, logits: Tensor, **rest: Any) -> Any:
    return op(logits=bf16(logits).float(), **rest)


@FRONT(
    "moe-front-bf16-logits",
    "fused front stores BF16 logits up to 16 rows",
    kind=Kind.ONE_BIN,
    sources="M33",
    missed_by="large batches",
)
def _front(op: Any, *, x: Tensor, **rest: Any) -> Any:
    logits, z = op(x=x, **rest)
    return (bf16(logits).float() if x.shape[0] <= 16 else logits), z


@FRONT(
    "moe-front-bf16-sum",
    "router logits accumulated in BF16 chunks",
    kind=Kind.REDUCTION,
    sources="M34",
    missed_by="a reference made of the same merged weight",
)
def _chunks(op: Any, *, x: Tensor, gate_weight: Tensor, **rest: Any) -> Any:
    _, z = op(x=x, gate_weight=gate_weight, **rest)
    total = torch.zeros(x.shape[0], gate_weight.shape[0])
    for part, weight in zip(x.split(32, 1), gate_weight.split(32, 1), strict=True):
        total = bf16(total + part.float() @ weight.float().T).float()
    return total, z


@FRONT(
    "moe-front-rows-shifted",
    "down-projection rows start one row into the router's",
    kind=Kind.INDEX,
    sources="M138",
    missed_by="a reference made of the same merged weight",
)
def _merged(op: Any, *, gate_weight: Tensor, down_weight: Tensor, **rest: Any) -> Any:
    shifted = torch.cat([gate_weight[-1:], down_weight[:-1]])
    return op(gate_weight=gate_weight, down_weight=shifted, **rest)


@ROUTE(
    "moe-bias-in-weights",
    "expert bias kept in the routing weights",
    kind=Kind.OPERAND,
    sources="M35, F: bias kept in weights",
    missed_by="the chosen set",
)
def _bias_in_weights(op: Any, *, logits: Tensor, bias: Tensor, scaling: float, **rest: Any) -> Any:
    ids, _ = op(logits=logits, bias=bias, scaling=scaling, **rest)
    biased = (torch.sigmoid(logits) + bias).gather(-1, ids)
    return ids, biased / biased.sum(-1, keepdim=True) * scaling


@ROUTE(
    "moe-score-by-subtraction",
    "score recovered as (score + bias) - bias",
    kind=Kind.ROUNDING,
    sources="M35",
    missed_by="ordinary logits (2e-7)",
)
def _subtracted(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    ranking = torch.sigmoid(logits) + bias
    return chosen(ranking, ranking - bias, top_k, scaling)


@ROUTE(
    "moe-bias-bf16",
    "correction bias narrowed to BF16 before the choice",
    kind=Kind.ROUNDING,
    sources="M36",
    missed_by="a check of the weights alone",
)
def _bias(op: Any, *, bias: Tensor, **rest: Any) -> Any:
    return op(bias=bf16(bias).float(), **rest)


@ROUTE(
    "moe-scores-bf16",
    "scores rounded to BF16: a quarter of the sets change",
    kind=Kind.ROUNDING,
    sources="M37",
    missed_by="moderate logits and few experts",
)
def _scores(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    scores = bf16(torch.sigmoid(logits)).float()
    return chosen(scores + bias, scores, top_k, scaling)


@ROUTE(
    "moe-topk-on-logits",
    "experts ranked by logits instead of scores",
    kind=Kind.OPERAND,
    sources="M37",
    missed_by="a bias of zero",
)
def _on_logits(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    return chosen(logits + bias, torch.sigmoid(logits), top_k, scaling)


@ROUTE(
    "moe-nan-row-sentinel",
    "a row of NaN chooses an expert that does not exist",
    kind=Kind.MASK,
    sources="M39",
    missed_by="clean padding",
)
def _sentinel(op: Any, *, logits: Tensor, **rest: Any) -> Any:
    ids, weights = op(logits=logits, **rest)
    return torch.where(logits.isnan().any(-1, keepdim=True), logits.shape[1], ids), weights


@ROUTE(
    "moe-ids-below-256",
    "experts from 256 on are never proposed (one thread each)",
    kind=Kind.INDEX,
    sources="M40",
    missed_by="models with up to 256 experts",
)
def _capped(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    ranking = torch.sigmoid(logits) + bias
    ranking[:, 256:] = -torch.inf
    return chosen(ranking, torch.sigmoid(logits), top_k, scaling)


@ROUTE(
    "moe-tie-epsilon",
    "ties broken by index * 3e-7, which reorders unequal scores",
    kind=Kind.CONSTANT,
    sources="M41",
    missed_by="an oracle that repeats it",
)
def _epsilon(op: Any, *, logits: Tensor, bias: Tensor, **rest: Any) -> Any:
    return op(logits=logits, bias=bias - torch.arange(bias.shape[0]) * 3e-7, **rest)


@ROUTE(
    "moe-ties-to-higher-id",
    "exact ties go to the higher expert id",
    kind=Kind.OPERAND,
    sources="M42",
    missed_by="nothing should see it by sets",
    equivalent="experts that tie exactly are equally right: the chosen scores, sorted, are the same bits",
)
def _ties(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    last = logits.shape[1] - 1
    # In FP64, as both paths do: a library's vector body and scalar tail differ in FP32's last bit.
    scores = torch.sigmoid(logits.double()).float()
    ids, weights = chosen((scores + bias).flip(-1), scores.flip(-1), top_k, scaling)
    return last - ids, weights


@ROUTE(
    "moe-ids-unsorted",
    "chosen experts come in ascending id order",
    kind=Kind.LAYOUT,
    sources="kind of M42",
    missed_by="sets",
)
def _unsorted(op: Any, **case: Any) -> Any:
    ids, weights = op(**case)
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


@ROUTE(
    "moe-weights-misaligned",
    "weights in another order than their experts",
    kind=Kind.INDEX,
    sources="kind of M45",
    missed_by="sets; the sum of the weights",
)
def _misaligned(op: Any, **case: Any) -> Any:
    ids, weights = op(**case)
    return ids, weights.roll(1, -1)


@ROUTE(
    "moe-not-renormalised",
    "weights not divided by their sum",
    kind=Kind.DROPPED,
    sources="F: missing renormalisation",
    missed_by="logits: a norm behind the experts cancels the factor (1e-5)",
)
def _raw(op: Any, *, logits: Tensor, scaling: float, **rest: Any) -> Any:
    ids, _ = op(logits=logits, scaling=scaling, **rest)
    return ids, torch.sigmoid(logits).gather(-1, ids) * scaling


@ROUTE(
    "moe-one-expert-short",
    "one expert fewer is chosen; the last slot repeats the first with weight 0",
    kind=Kind.INDEX,
    sources="kind of M40",
    missed_by="cosine",
)
def _short(op: Any, *, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> Any:
    ids, weights = op(logits=logits, bias=bias, top_k=top_k, scaling=scaling)
    kept = weights[:, :-1] / weights[:, :-1].sum(-1, keepdim=True) * scaling
    spare = (ids[:, :1] + 1) % logits.shape[1]
    return torch.cat([ids[:, :-1], spare], -1), torch.nn.functional.pad(kept, (0, 1))
