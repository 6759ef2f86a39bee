"""Bounds of a mean by resampling whole blocks: entries that are independent, or clusters of entries that are not."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, t


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

    No percentile lies beyond the largest entry, and a few entries of symmetric noise are all on one side of 0 with
    probability 2^-n. Where that is more than `alpha`, the bounds are at least as wide as Student's.

    Raises:
        ValueError: no values, a value that is not finite, or an alpha outside (0, 0.5).
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size or not np.isfinite(data).all():
        raise ValueError(
            f"bootstrap_mean needs finite values, got {data.size} of which {(~np.isfinite(data)).sum()} are not"
        )
    _check(alpha)
    return cluster_bootstrap(data, range(data.size), alpha, seed, resamples)


def cluster_bootstrap(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[Hashable],
    alpha: float,
    seed: int,
    resamples: int = 10_000,
) -> Interval:
    """As `bootstrap_mean`, resampling clusters: `clusters[i]` names the block that entry i is part of.

    Repeats of one item, or questions about one conversation, move together; a cluster is drawn with all its entries,
    and a resample's mean is over the entries that it drew. `n` of the result is the number of clusters.

    Raises:
        ValueError: as `bootstrap_mean`, or not one cluster per value.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not data.size or not np.isfinite(data).all() or len(clusters) != data.size:
        raise ValueError(f"cluster_bootstrap needs finite values with a cluster each, got {data.size}, {len(clusters)}")
    _check(alpha)
    place = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    of = np.array([place[name] for name in clusters])
    sums, sizes, n = np.bincount(of, data), np.bincount(of), len(place)
    mean = float(data.mean())
    if n == 1:
        return Interval(mean, -math.inf, math.inf, alpha, 1)
    draws = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    tail = norm.cdf(math.sqrt(n / (n - 1)) * t.ppf(alpha, n - 1))
    lower, upper = map(float, np.quantile(means, [tail, 1 - tail]))
    if 0.5**n > alpha:
        half = -float(t.ppf(alpha, n - 1)) * float((sums / sizes).std(ddof=1)) / math.sqrt(n)
        lower, upper = min(lower, mean - half), max(upper, mean + half)
    return Interval(mean, lower, upper, alpha, n)


def _check(alpha: float) -> None:
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha is {alpha}, a probability between 0 and 0.5 is needed")
