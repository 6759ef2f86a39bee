"""Statistics of paired comparisons: pure functions on arrays, seeded where they resample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest, norm, t


@dataclass(frozen=True)
class Interval:
    """A mean with its one-sided bounds, each meant to be exceeded with probability `alpha`."""

    mean: float
    lower: float
    upper: float
    alpha: float
    n: int


def bootstrap_mean(values: Sequence[float], alpha: float, seed: int, resamples: int = 10_000) -> Interval:
    """One-sided expanded-percentile bounds of a mean, resampling whole entries.

    An entry is one independent block (a prompt, an item): tokens of one prompt are not independent, so their mean is
    one entry. Plain percentiles (Efron and Tibshirani, 1993, chapter 13) are too narrow for few entries: a resample's
    spread is sqrt((n-1)/n) of the sample's, and normal quantiles stand where Student's belong. The percentile is moved
    out by both factors (Hesterberg, 2015, section 5.3). On skewed data the bound on the side of the long tail is still
    exceeded more often than `alpha`. A single entry says nothing about its spread: its bounds are infinite.

    Raises:
        ValueError: no values, a value that is not finite, or an alpha outside (0, 0.5).
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size or not np.isfinite(data).all():
        raise ValueError(
            f"bootstrap_mean needs finite values, got {data.size} of which {(~np.isfinite(data)).sum()} are not"
        )
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha is {alpha}, a probability between 0 and 0.5 is needed")
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, -math.inf, math.inf, alpha, 1)
    draws = np.random.default_rng(seed).integers(0, data.size, size=(resamples, data.size))
    means = data[draws].mean(axis=1)
    tail = norm.cdf(math.sqrt(data.size / (data.size - 1)) * t.ppf(alpha, data.size - 1))
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(lower), float(upper), alpha, int(data.size))


def mcnemar_worse(lost: int, gained: int) -> float:
    """Exact one-sided p-value that paired outcomes got worse: `lost` pairs went from good to bad, `gained` back.

    Pairs that agree say nothing. Under no change each discordant pair falls either way with probability 1/2.

    Raises:
        ValueError: a negative count.
    """
    if lost < 0 or gained < 0:
        raise ValueError(f"{lost} lost and {gained} gained pairs, counts >= 0 are needed")
    discordant = lost + gained
    return float(binomtest(lost, discordant, 0.5, alternative="greater").pvalue) if discordant else 1.0
