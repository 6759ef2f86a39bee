"""Faults of multi-head latent attention and its cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Fault, Ops


def _drop_key_scale(ops: Ops) -> Ops:
    attend: Any = ops["mla_attend"]
    return {"mla_attend": lambda *, k_scale, **rest: attend(k_scale=1.0, **rest)}


def _natural_merge(partials: Tensor, lse: Tensor) -> Tensor:
    weights = torch.exp(lse - lse.amax(1, keepdim=True))[..., None]
    return (partials * weights).sum(1) / weights.sum(1)


def _forget_last_key(ops: Ops) -> Ops:
    attend: Any = ops["mla_attend"]

    def faulty(*, lengths: Tensor, cache: Tensor, **rest: Any) -> Any:
        starts_page = (lengths > 1) & (lengths % cache.shape[1] == 1)
        return attend(lengths=lengths - starts_page.long(), cache=cache, **rest)

    return {"mla_attend": faulty}


def _unscaled_write(ops: Ops) -> Ops:
    query: Any = ops["mla_query"]
    return {"mla_query": lambda *, k_scale, **rest: query(k_scale=1.0, **rest)}


FAULTS = (
    Fault(
        "mla-fp8-scale-dropped",
        "FP8 key scale dropped in decode attention",
        "mla_attend",
        ("M23", "M24"),
        ("specialized",),
        _drop_key_scale,
    ),
    Fault(
        "mla-fp8-scale-not-written",
        "latent rows written to the FP8 cache without their scale",
        "mla_query",
        ("M24",),
        ("specialized",),
        _unscaled_write,
    ),
    Fault(
        "mla-lse-base",
        "base-2 log-sum-exps merged as natural ones",
        "mla_attend",
        ("M29",),
        ("specialized",),
        lambda ops: {"mla_attend": partial(ops["mla_attend"], merge=_natural_merge)},
    ),
    Fault(
        "mla-last-key-forgotten",
        "the first key of a new page is not seen by its own token",
        "mla_attend",
        ("F: ctx%block==1",),
        ("specialized",),
        _forget_last_key,
    ),
)
