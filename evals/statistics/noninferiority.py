"""Non-inferiority of paired scores: bounds of the damage, the decision against a margin, and its p-values.

Damage is baseline minus candidate, scores in [0, 1]. Repeats are averaged per item first. The bounds take an item's
mean as the unit, and hold for rare one-way losses, where a variance estimate says nothing (no loss seen is no proof
of none: 0 of N leaves 3/N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import t

Array = Any
"""A float or a float64 array; every function here works on arrays of runs alike."""

_LEAST_P = 1e-12
"""p-values below are given as this: no normal approximation is believed further out."""


class Outcome(StrEnum):
    """What the evidence says about a margin."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Evidence:
    """Mean damage, the variance of that mean, its degrees of freedom, and by how much one lost pair moves the mean.

    `jump` is the difference of a pair that moved: 1 where answers are right or wrong, less where scores are ratios.
    Only the printed power depends on it, no bound.
    """

    mean: Array
    variance: Array
    freedom: float
    step: float
    jump: float = 1.0


def evidence(item_damage: Sequence[float] | np.ndarray, pairs: int) -> Evidence:
    """The evidence of items' mean damages f64 [..., items]; `pairs` counts the independent pairs behind them all.

    Repeats of a greedy answer are one pair. The variance is that of item means over items: it has the noise of repeats
    and also how differently damage falls on items, so it does not presume that all items suffer alike.

    Raises:
        ValueError: no item, a damage that is not finite, or fewer pairs than items.
    """
    data = np.asarray(item_damage, dtype=np.float64)
    items = data.shape[-1] if data.ndim else 0
    if not items or not np.isfinite(data).all() or pairs < items:
        raise ValueError(f"{items} items of finite damage with at least a pair each are needed, got {pairs} pairs")
    variance = data.var(axis=-1, ddof=1) / items if items > 1 else np.full(data.shape[:-1], math.inf)
    mean = data.mean(axis=-1)
    scalar = data.ndim == 1
    return Evidence(float(mean) if scalar else mean, float(variance) if scalar else variance, items - 1, 1 / pairs)


def pooled(parts: Sequence[Evidence]) -> Evidence:
    """The evidence of the mean damage over evals, each with the same weight.

    Degrees of freedom after Welch (1947) and Satterthwaite (1946); the step is the largest that one pair makes.
    """
    n = len(parts)
    terms = [part.variance / n**2 for part in parts]
    variance = sum(terms)
    spread = sum(term**2 / part.freedom for term, part in zip(terms, parts, strict=True) if part.freedom)
    least = min(part.freedom for part in parts)
    freedom = variance**2 / spread if spread and math.isfinite(variance) else least
    return Evidence(sum(p.mean for p in parts) / n, variance, max(least, freedom), max(p.step for p in parts) / n)


def reach(variance: Array, freedom: float, step: float, alpha: float) -> Array:
    """How far a one-sided bound at level `alpha` lies from the mean: `h + sqrt(t^2 V + h^2)`, h = step ln(1/alpha) / 2.

    Without spread this is step ln(1/alpha), exact where no loss was seen; with spread it follows the exact bound of a
    Poisson count within 1 % at alpha = 0.05, and Student's for large samples.
    """
    if freedom < 1:
        return math.inf
    half = step * -math.log(alpha) / 2
    return half + np.sqrt(t.ppf(1 - alpha, freedom) ** 2 * variance + half**2)


def upper_bound(seen: Evidence, alpha: float = 0.05) -> Array:
    """The damage that is exceeded with confidence alpha at most."""
    return seen.mean + reach(seen.variance, seen.freedom, seen.step, alpha)


def lower_bound(seen: Evidence, alpha: float = 0.05) -> Array:
    """The damage that is there at least, with confidence 1 - alpha."""
    return seen.mean - reach(seen.variance, seen.freedom, seen.step, alpha)


def decide(seen: Evidence, margin: float, alpha: float = 0.05) -> Outcome:
    """GO where the upper bound is within the margin, NO-GO where the lower bound is beyond, else UNDECIDED."""
    if upper_bound(seen, alpha) <= margin:
        return Outcome.GO
    return Outcome.NO_GO if lower_bound(seen, alpha) > margin else Outcome.UNDECIDED


def p_beyond(seen: Evidence, damage: float) -> float:
    """One-sided p-value that the true damage is above `damage`: the alpha whose lower bound is `damage`."""
    return _p(lambda alpha: float(lower_bound(seen, alpha) - damage))


def p_within(seen: Evidence, damage: float) -> float:
    """One-sided p-value that the true damage is below `damage`: the alpha whose upper bound is `damage`."""
    return _p(lambda alpha: float(damage - upper_bound(seen, alpha)))


def _p(surplus: Any) -> float:
    """The alpha at which the surplus, which grows with it, turns positive; 0.5 where it does not below."""
    if not surplus(0.5) > 0:
        return 0.5
    return _LEAST_P if surplus(_LEAST_P) > 0 else float(brentq(surplus, _LEAST_P, 0.5, xtol=_LEAST_P))
