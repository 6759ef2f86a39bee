"""Steps in a series: binary segmentation, each split tested by permutation.

A stretch is split where the CUSUM statistic is largest (Vostrikova, 1981). The split counts where no more than a share
`alpha` of random orders of the same values reach as large a maximum: a permutation test of the maximum (Antoch and
Huskova, 2001), exact whatever the distribution, because runs without a step are exchangeable. The same is done with
both parts, as E-divisive does (Matteson and James, 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

ALPHA = 0.01
"""Share of step-free stretches that are split by mistake; a figure of ten runs or so can pass it."""

LEAST = 3
"""Runs on either side of a split: fewer have no level."""

_FEW, _MANY = 199, 19_999
"""Random orders: few settle the clear cases without a step; many resolve p to 5e-5, for many figures at once."""

_CHUNK = 2_000_000


@dataclass(frozen=True)
class Step:
    """Values from `index` on lie at another level."""

    index: int
    before: float
    after: float
    p: float


def steps(values: Sequence[float], alpha: float = ALPHA, seed: int = 0) -> list[Step]:
    """Steps of a series in its order; non-finite values are not allowed.

    Raises:
        ValueError: a value is not finite.
    """
    series = np.asarray(values, dtype=np.float64)
    if not np.isfinite(series).all():
        raise ValueError("a series with values that are not finite has no level")
    random = np.random.default_rng(seed)
    splits = sorted(_split(series, 0, len(series), alpha, random))
    edges = [0, *(index for index, _ in splits), len(series)]
    return [
        Step(index, float(series[edges[i] : index].mean()), float(series[index : edges[i + 2]].mean()), p)
        for i, (index, p) in enumerate(splits)
    ]


def _split(series: Values, start: int, end: int, alpha: float, random: np.random.Generator) -> list[tuple[int, float]]:
    stretch = series[start:end]
    if len(stretch) < 2 * LEAST or np.ptp(stretch) == 0:
        return []
    scores = _cusum(stretch[None])[0]
    place, largest = int(scores.argmax()), float(scores.max())
    p = _p(stretch, largest, _FEW, random)
    if p > 3 * alpha:
        return []
    p = _p(stretch, largest, _MANY, random)
    if p > alpha:
        return []
    index = start + LEAST + place
    return [
        (index, p),
        *_split(series, start, index, alpha, random),
        *_split(series, index, end, alpha, random),
    ]


def _cusum(rows: Values) -> Values:
    """|mean before - mean after| of every allowed split of every row, scaled to equal variance: f64 [rows, splits]."""
    n = rows.shape[1]
    sizes = np.arange(LEAST, n - LEAST + 1)
    centred = rows - rows.mean(axis=1, keepdims=True)
    sums = centred.cumsum(axis=1)[:, LEAST - 1 : n - LEAST]
    scaled: Values = np.abs(sums) / np.sqrt(sizes * (n - sizes) / n)
    return scaled


def _p(stretch: Values, largest: float, orders: int, random: np.random.Generator) -> float:
    """Share of random orders, the given one among them, whose largest statistic is at least `largest`."""
    # Sums in another order round otherwise; a tie must count as one.
    level = largest * (1 - 1e-12)
    reached, left = 1, orders
    while left:
        count = min(left, max(1, _CHUNK // len(stretch)))
        rows = random.permuted(np.broadcast_to(stretch, (count, len(stretch))), axis=1)
        reached += int((_cusum(rows).max(axis=1) >= level).sum())
        left -= count
    return reached / (orders + 1)
