"""Statistics of paired comparisons: pure functions on arrays, seeded where they resample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean with its one-sided bounds: each is exceeded with probability `alpha` at most."""

    mean: float
    lower: float
    upper: float
    alpha: float
    n: int


def bootstrap_mean(values: Sequence[float], alpha: float, seed: int, resamples: int = 10_000) -> Interval:
    """One-sided percentile bounds of a mean, resampling whole entries.

    An entry is one independent block (a prompt, an item): tokens of one prompt are not independent, so their mean is
    one entry. Efron and Tibshirani (1993), chapter 13.

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
    draws = np.random.default_rng(seed).integers(0, data.size, size=(resamples, data.size))
    means = data[draws].mean(axis=1)
    lower, upper = np.quantile(means, [alpha, 1 - alpha])
    return Interval(float(data.mean()), float(lower), float(upper), alpha, int(data.size))
