"""Faults of the router, the experts and the residual mix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Fault, Ops


def _bias_in_weights(ops: Ops) -> Ops:
    route: Any = ops["route"]

    def faulty(*, logits: Tensor, bias: Tensor, scaling: float, **rest: Any) -> Any:
        ids, _ = route(logits=logits, bias=bias, scaling=scaling, **rest)
        biased = (torch.sigmoid(logits) + bias).gather(-1, ids)
        return ids, biased / biased.sum(-1, keepdim=True) * scaling

    return {"route": faulty}


def _round_logits(ops: Ops) -> Ops:
    route: Any = ops["route"]
    return {"route": lambda *, logits, **rest: route(logits=logits.bfloat16().float(), **rest)}


def _silu_experts(ops: Ops) -> Ops:
    experts: Any = ops["experts"]
    return {"experts": lambda *, beta, linear_beta, **rest: experts(beta=1e4, linear_beta=1e4, **rest)}


def _stale_rank(ops: Ops) -> Ops:
    mix: Any = ops["output_mix"]
    previous: dict[torch.Size, Tensor] = {}

    def faulty(*, y: list[Tensor], **rest: Any) -> Any:
        last = y[-1].clone()
        stale = previous.get(last.shape, torch.zeros_like(last))
        previous[last.shape] = last
        return mix(y=[*y[:-1], stale], **rest)

    return {"output_mix": faulty}


def _prefix_not_replaced(ops: Ops) -> Ops:
    mix: Any = ops["output_mix"]
    return {"output_mix": lambda *, replace_prefix, **rest: mix(replace_prefix=False, **rest)}


FAULTS = (
    Fault(
        "moe-bias-in-weights",
        "expert bias kept in the routing weights",
        "route",
        ("M35", "F: bias kept in weights"),
        ("specialized",),
        _bias_in_weights,
    ),
    Fault(
        "moe-logits-bf16",
        "router logits rounded to BF16 before the choice",
        "route",
        ("M33",),
        ("specialized",),
        _round_logits,
    ),
    Fault(
        "moe-silu",
        "experts' SiTU replaced by an unsaturated gate",
        "experts",
        ("M51",),
        ("specialized",),
        _silu_experts,
    ),
    Fault(
        "reduce-stale-rank",
        "the last rank's partial is the previous call's",
        "output_mix",
        ("M98", "M100"),
        ("specialized",),
        _stale_rank,
    ),
    Fault(
        "residual-prefix-kept",
        "a block-write layer adds to the prefix instead of starting it anew",
        "output_mix",
        ("M54",),
        ("specialized",),
        _prefix_not_replaced,
    ),
)
