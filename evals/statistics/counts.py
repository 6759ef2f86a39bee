"""How many pairs may be lost and gained over items, and how they may meet on items: the exact joint distribution."""

from __future__ import annotations

import math

import numpy as np
from scipy.fft import irfft2, next_fast_len, rfft2

_DEVIATIONS, _OF_SQUARES = 7.0, 12.0
"""Standard deviations that are kept of a sum, and of a sum of squares: over two items that is about an exponential
variate, of which 2e-6 is beyond."""

_ROOM = 8
"""Kept beyond that: where less than one pair moves, a deviation says little."""

_DUST = 1e-12
"""Probabilities below come of rounding in the transform."""


def sums_over_items(lost: float, gained: float, pairs: int, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcomes of a run whose `pairs`, spread evenly over `items`, are lost or gained independently.

    `lost` and `gained` are expected numbers, together at most `pairs`. With x an item's losses less its gains, the
    result is sum x, the sum of squares of x around its mean over items, and their probability, one entry an outcome.
    Items are independent, so the distribution of (sum x, sum x^2) is a convolution power, which a transform gives.
    """
    p, q = lost / pairs, gained / pairs
    middle = round((lost - gained) / items)
    per_item = pairs / items
    # Moments of y = x - middle by those of a normal variate, with the fourth cumulant of rare counts besides.
    mean, variance = per_item * (p - q) - middle, per_item * (p + q - (p - q) ** 2)
    spread = 2 * variance**2 + 4 * mean**2 * variance + per_item * (p + q)
    most = _most(items * (mean**2 + variance), items * spread, _OF_SQUARES)
    reach = _most(items * abs(mean), items * variance, _DEVIATIONS)
    shape = next_fast_len(2 * reach + 1, real=True), next_fast_len(most + 1, real=True)
    few, more = math.floor(per_item), math.ceil(per_item)
    larger = pairs - few * items
    transform = rfft2(_item(few, p, q, middle, shape)) ** (items - larger)
    if larger:
        transform = transform * rfft2(_item(more, p, q, middle, shape)) ** larger
    weight = irfft2(transform, shape)
    place, squares = np.nonzero(weight > _DUST)
    surplus = np.where(place > shape[0] // 2, place - shape[0], place)
    return surplus + middle * items, squares - surplus**2 / items, weight[place, squares]


def _most(mean: float, variance: float, deviations: float) -> int:
    return math.ceil(mean + deviations * math.sqrt(variance)) + _ROOM


def _item(pairs: int, p: float, q: float, middle: int, shape: tuple[int, int]) -> np.ndarray:
    """Probability of one item's (y, y^2), y = losses - gains - middle, by their places; y < 0 counts from the end."""
    turn = np.exp(2j * math.pi * np.arange(2 * pairs + 1) / (2 * pairs + 1))
    chance = np.fft.fft((p * turn + max(0.0, 1 - p - q) + q / turn) ** pairs).real / (2 * pairs + 1)
    y = np.arange(-pairs, pairs + 1) - middle
    kept = (abs(y) <= shape[0] // 2) & (y**2 < shape[1])
    grid = np.zeros(shape)
    grid[y[kept], y[kept] ** 2] = chance[y[kept] + middle]
    return grid
