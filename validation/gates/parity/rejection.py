"""Rejection sampling of drafts: what is committed has exactly the target's distribution, whatever the drafter's is.

By enumeration: probabilities are multiples of 1/6, so that every acceptance ratio and every residual is a multiple of
1/60, and 60 evenly spread random numbers in place of one count both without error. What a chain of up to 3 drafts
commits is then compared with the target's distribution as fractions: no tolerance, no luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from validation.gates.base import Finding
from validation.targets.optional import Accepting

UNIT = "rejection"
"""The unit's id."""

_PARTS, _NUMBERS = 6, 60
"""Probabilities are multiples of 1/6; 60 is a multiple of every denominator that a ratio or a residual can have."""

CHAINS = ((2, 3), (3, 3), (4, 2), (5, 1))
"""Size of the vocabulary, drafts in a row."""

Distribution = tuple[int, ...]
"""Sixths, by token."""


def measure_rejection(arm: Accepting, seed: int) -> list[Mapping[str, Any]]:
    """Plain JSON: for every chain the distance of what is committed from the target's, and drafts accepted."""
    return [_chain(arm, size, drafts, seed) for size, drafts in CHAINS]


def _chain(arm: Accepting, size: int, drafts: int, seed: int) -> dict[str, Any]:
    places = np.random.default_rng((seed, size, drafts))
    contexts = [context for length in range(drafts) for context in product(range(size), repeat=length)]
    p = {context: _drawn(places, size) for context in contexts}
    q = {context: _drawn(places, size) for context in contexts}

    @cache
    def outcomes(context: tuple[int, ...]) -> tuple[Mapping[int, Fraction], Fraction]:
        return _row(arm, p[context], q[context])

    committed = {tokens: Fraction(0) for tokens in product(range(size), repeat=drafts)}
    exact = {
        tokens: prod((Fraction(p[tokens[:i]][tokens[i]], _PARTS) for i in range(drafts)), start=Fraction(1))
        for tokens in committed
    }
    for tokens in committed:
        # Every row commits its token; the chain goes on behind it, in this step or in the next.
        committed[tokens] = prod(
            (outcomes(tokens[:i])[0].get(tokens[i], Fraction(0)) for i in range(drafts)), start=Fraction(1)
        )
    return {
        "vocabulary": size,
        "drafts": drafts,
        "variation": float(sum(abs(committed[t] - exact[t]) for t in exact) / 2),
        "accepted": float(sum(outcomes(c)[1] for c in contexts) / len(contexts)),
        "exact_accepted": float(sum(Fraction(sum(map(min, p[c], q[c])), _PARTS) for c in contexts) / len(contexts)),
    }


def _row(arm: Accepting, p: Distribution, q: Distribution) -> tuple[dict[int, Fraction], Fraction]:
    """Distribution of the committed token, and the chance that it is an accepted draft."""
    target, drafter = (torch.tensor(x, dtype=torch.float64) / _PARTS for x in (p, q))
    numbers = [(i + 0.5) / _NUMBERS for i in range(_NUMBERS)]
    committed: dict[int, Fraction] = {}
    accepted_in_all = Fraction(0)
    for draft in (token for token, part in enumerate(q) if part):
        chance = Fraction(q[draft], _PARTS)
        accepted = sum(arm.accept(target, drafter, draft, number, 0.5)[1] for number in numbers)
        accepted_in_all += chance * Fraction(accepted, _NUMBERS)
        committed[draft] = committed.get(draft, Fraction(0)) + chance * Fraction(accepted, _NUMBERS)
        for number in numbers if accepted < _NUMBERS else ():
            token, _ = arm.accept(target, drafter, draft, numbers[-1], number)
            committed[token] = committed.get(token, Fraction(0)) + chance * Fraction(
                _NUMBERS - accepted, _NUMBERS * _NUMBERS
            )
    return committed, accepted_in_all


def _drawn(places: np.random.Generator, size: int) -> Distribution:
    return tuple(np.bincount(places.integers(0, size, _PARTS), minlength=size).tolist())


def rejection_findings(unit: str, chains: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """A chain whose committed distribution is not the target's."""
    for chain in chains:
        if chain["variation"]:
            yield Finding(
                "accept",
                f"{chain['drafts']} drafts of {chain['vocabulary']} tokens: what rejection sampling commits is "
                f"{chain['variation']:.3g} off the target's distribution (total variation, by enumeration), allowed 0; "
                f"it accepts {chain['accepted']:.3f} of the drafts, exact is {chain['exact_accepted']:.3f}",
                unit,
            )
