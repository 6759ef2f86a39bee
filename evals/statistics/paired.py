"""Exact tests of paired outcomes, and Holm's correction for several of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest

_EXACT_ITEMS = 14
"""Items with a difference up to which all sign patterns are enumerated: 16,384."""

_ROUNDING = 1e-12
"""Two sums of the same at most 1-sized terms in another order differ by less; they count as equal."""


def permutation_worse(damage: Sequence[float] | np.ndarray, seed: int, resamples: int = 10_000) -> float:
    """One-sided p-value that the mean of paired differences is above 0; each entry is one item's mean difference.

    Under no change an item's difference could as well have had the other sign. All sign patterns are enumerated where
    few items differ; else `resamples` seeded ones are drawn, and the observed one counts as one of them (Phipson and
    Smyth, 2010), so p is never 0.

    Raises:
        ValueError: no differences, or one that is not finite.
    """
    data = np.asarray(damage, dtype=np.float64)
    if not data.size or not np.isfinite(data).all():
        raise ValueError(f"permutation_worse needs finite differences, got {data.size}")
    moved = data[data != 0]
    if not moved.size:
        return 1.0
    least = moved.sum() - _ROUNDING * moved.size
    if moved.size <= _EXACT_ITEMS:
        patterns = np.arange(2**moved.size)[:, None] >> np.arange(moved.size) & 1
        return float(np.mean((1 - 2 * patterns) @ moved >= least))
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(resamples, moved.size))
    return float((1 + np.sum(signs @ moved >= least)) / (1 + resamples))


def pooled_permutation_worse(damages: Sequence[Sequence[float]], seed: int, resamples: int = 10_000) -> float:
    """As `permutation_worse` for the mean over several evals of their mean damage, each eval with the same weight."""
    scaled = [np.asarray(damage, dtype=np.float64) / len(damage) for damage in damages]
    return permutation_worse(np.concatenate(scaled), seed, resamples)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p-value that paired outcomes changed; see `mcnemar_worse`."""
    return _binomial(lost, gained, "two-sided")


def mcnemar_worse(lost: int, gained: int) -> float:
    """Exact one-sided p-value that paired outcomes got worse: `lost` pairs went from good to bad, `gained` back.

    Pairs that agree say nothing. Under no change each discordant pair falls either way with probability 1/2.

    Raises:
        ValueError: a negative count.
    """
    return _binomial(lost, gained, "greater")


def _binomial(lost: int, gained: int, alternative: str) -> float:
    if lost < 0 or gained < 0:
        raise ValueError(f"{lost} lost and {gained} gained pairs, counts >= 0 are needed")
    discordant = lost + gained
    return float(binomtest(lost, discordant, 0.5, alternative=alternative).pvalue) if discordant else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values, in the order given: those <= alpha are significant together at alpha.

    Raises:
        ValueError: a value that is no probability.
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError(f"p-values are {list(p_values)}, probabilities are needed")
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted
