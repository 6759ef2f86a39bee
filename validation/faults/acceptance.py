"""Faults of rejection sampling: what is committed is biased, while acceptance looks healthy or even better."""

from __future__ import annotations

from functools import partial
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("acceptance", kind=Kind.SAMPLING)

ACCEPT = partial(LAYER.engine, "accept")


@ACCEPT(
    "accept-other-q",
    "acceptance ratio uses a distribution that the drafts were not drawn from: theirs at a higher temperature",
    sources="M126",
    missed_by="mean acceptance (which rises); greedy decoding",
)
def _other_q(right: Any) -> Any:
    def faulty(p: Any, q: Any, *rest: Any) -> Any:
        flat = q**0.7
        return right(p, flat / flat.sum(), *rest)

    return faulty


@ACCEPT(
    "accept-residual-is-target",
    "a refused draft is replaced from the whole target distribution",
    sources="kind of M127",
    missed_by="acceptance, which is right; sampled total variation (1e-3)",
)
def _residual(right: Any) -> Any:
    def faulty(p: Any, q: Any, draft: int, *numbers: float) -> Any:
        token, accepted = right(p, q, draft, *numbers)
        return (token, accepted) if accepted else right(p, p * 0.0, draft, *numbers)

    return faulty


@ACCEPT(
    "accept-refused-draft-kept",
    "every draft is committed, as synthetic acceptance does for timing",
    sources="kind of M126",
    missed_by="acceptance length, which is the best there is",
)
def _kept(right: Any) -> Any:
    return lambda p, q, draft, *numbers: (draft, True)


LAYER.declare(
    "accept",
    "accept-token-residual",
    "block verification with the token-wise residual",
    sources="M127",
    missed_by="sampled total variation (1e-3)",
    not_applicable="drafts are verified token by token; there is no block rule whose residual could be another",
)
