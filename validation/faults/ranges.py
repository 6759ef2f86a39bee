"""Faults that only values of an unusual size show: scores far below 0, weights above 1, scales beyond FP16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind
from validation.faults.experts import rescaled
from validation.faults.layer import Layer

LAYER = Layer("ranges of values", kind=Kind.CONSTANT)

ROUTE = partial(LAYER.op, "route")
EXPERTS = partial(LAYER.op, "experts")


def from_zero(right: Any, partials: Tensor, lse: Tensor) -> Tensor:
    """The merge with a largest log-sum-exp that is never below 0."""
    weights = torch.exp2((lse - lse.amax(1, keepdim=True).clamp_min(0.0)).double()).float()
    return (partials * weights[..., None]).sum(1) / weights.sum(1)[..., None]


for _op, _id, _of in (
    ("mla_attend", "mla-merge-max-from-zero", "splits"),
    ("mla_attend_dcp", "dcp-merge-max-from-zero", "ranks"),
):
    LAYER.part(
        _op,
        "merge",
        _id,
        f"largest log-sum-exp of the merge of {_of} starts at 0",
        sources="kind of M17",
        missed_by="scores above -87: 0 / 0 where all are far below 0",
    )(from_zero)


@ROUTE(
    "moe-route-max-from-zero",
    "running maximum of the choice starts at 0: a score that its bias takes below is never chosen",
    sources="kind of M40",
    missed_by="biases that leave enough scores above 0",
)
def _route_from_zero(op: Any, *, logits: Tensor, bias: Tensor, **rest: Any) -> Any:
    ids, weights = op(logits=logits, bias=bias, **rest)
    ranking = torch.sigmoid(logits.double()) + bias.double()
    return torch.where(ranking.gather(-1, ids) <= 0, 0, ids), weights


@ROUTE(
    "moe-weights-zero-by-zero",
    "the constant in the sum of the weights is left out: 0 / 0 where FP32 has no score above 0",
    sources="kind of M82",
    missed_by="rows with a score that FP32 holds",
)
def _no_constant(op: Any, *, logits: Tensor, **rest: Any) -> Any:
    ids, weights = op(logits=logits, **rest)
    none = torch.sigmoid(logits.double()).float().gather(-1, ids).sum(-1, keepdim=True) == 0
    return ids, torch.where(none, torch.nan, weights)


@EXPERTS(
    "moe-weight-above-one",
    "routing weights held to 1, as if there were no scaling factor",
    sources="kind of M51",
    missed_by="weights that add up to 1",
)
def _held(op: Any, *, weights: Tensor, **rest: Any) -> Any:
    return op(weights=weights.clamp_max(1.0), **rest)


@EXPERTS(
    "moe-small-weight-skipped",
    "experts with a weight below 2^-7 are skipped",
    sources="kind of M40",
    missed_by="experts that all give results of one size",
)
def _skipped(op: Any, *, weights: Tensor, **rest: Any) -> Any:
    return op(weights=torch.where(weights < 2.0**-7, 0.0, weights), **rest)


@EXPERTS(
    "moe-scale-fp16",
    "block scales go through FP16: below 2^-24 they are 0",
    sources="kind of M47",
    missed_by="weights of ordinary size",
)
def _fp16(op: Any, *, w13: Any, w2: Any, **rest: Any) -> Any:
    w13, w2 = (rescaled(w, torch.where(w.scale < 127 - 24, 0, w.scale)) for w in (w13, w2))
    return op(w13=w13, w2=w2, **rest)


@LAYER.op(
    "kda_step",
    "kda-rate-held",
    "exp(A_log) held to 2",
    sources="kind of M07",
    missed_by="A_log near zero",
)
def _rate(op: Any, *, A_log: Tensor, **rest: Any) -> Any:
    return op(A_log=A_log.clamp_max(0.6931), **rest)


def lost_below_zero(op: Any, **case: Any) -> Any:
    """The mix with a largest score that is never below 0: 0 / 0 where FP32 has no exponential of any score."""
    prefix, mixed = op(**case)
    if case["num_blocks"]:
        sources = torch.cat([case["blocks"][:, : case["num_blocks"]], prefix[:, None]], 1).double()
        normed = sources * (sources.square().mean(-1, keepdim=True) + case["eps"]).rsqrt()
        scores = normed @ (case["norm_weight"].double() * case["query_weight"].double())
        mixed[scores.amax(-1) < -104] = torch.nan
    return prefix, mixed


for _op in ("attn_res", "output_mix"):
    LAYER.op(
        _op,
        f"{_op.replace('_', '-')}-max-from-zero",
        f"largest score of {_op}'s sources starts at 0",
        sources="kind of M17",
        missed_by="scores above -87",
    )(lost_below_zero)


@LAYER.part(
    "kda_step",
    "delta",
    "kda-silu-overflows",
    "silu as x exp(x) / (1 + exp(x)): NaN above 88",
    sources="kind of M47",
    missed_by="activations of ordinary size",
)
def _silu(delta: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Any:
    return delta(S, q, k, torch.where(v > 88.0, torch.nan, v), *gates)


FP16_MAX = 65504.0
"""Largest finite number of FP16."""

for _op, _id in (("projection", "projection-fp16"), ("all_reduce", "reduce-fp16"), ("mla_value", "mla-value-fp16")):

    @LAYER.op(
        _op,
        f"{_id}-range",
        f"result of {_op} held to what FP16 holds",
        kind=Kind.OVERFLOW,
        sources="kind of M47",
        missed_by="activations of ordinary size",
    )
    def _fp16_range(op: Any, **case: Any) -> Any:
        return op(**case).clamp(-FP16_MAX, FP16_MAX)
