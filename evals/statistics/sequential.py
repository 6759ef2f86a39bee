"""Looking at the data before all are there, at a price: alpha spending (Lan and DeMets, 1983)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

_GRID = 1201
"""Points of the integration over the running statistic; the critical values then agree with published ones to 1e-3."""

_FAR = 8.0
"""Standard deviations beyond which nothing is left to integrate."""


def spent(fraction: float, alpha: float) -> float:
    """One-sided level spent when this fraction of the information is in, after O'Brien and Fleming: late.

    Raises:
        ValueError: a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction of the information is {fraction}, above 0 and at most 1 is needed")
    return float(2 * norm.sf(norm.isf(alpha / 2) / np.sqrt(fraction)))


def critical_values(fractions: Sequence[float], alpha: float) -> list[float]:
    """z of each look, so that over all of them equal arms are rejected with probability `alpha`, one-sided.

    `fractions` are the shares of the planned information at the looks, rising, the last at most 1.

    Raises:
        ValueError: fractions that do not rise, or leave (0, 1].
    """
    if not fractions or any(b <= a for a, b in pairwise(fractions)):
        raise ValueError(f"fractions of the looks are {list(fractions)}; rising ones are needed")
    spending = np.diff([0.0, *(spent(fraction, alpha) for fraction in fractions)])
    values: list[float] = []
    grid, density = np.zeros(1), np.ones(1)
    last = 0.0
    for fraction, level in zip(fractions, spending, strict=True):
        sd = np.sqrt(fraction - last)

        def crossing(z: float, at: float = fraction, sd: float = sd, level: float = level) -> float:
            return float(np.sum(density * norm.sf((z * np.sqrt(at) - grid) / sd)) - level)  # noqa: B023

        z = float(brentq(crossing, -_FAR, 40.0))
        following = np.linspace(-_FAR * np.sqrt(fraction), z * np.sqrt(fraction), _GRID)
        width = np.full(_GRID, following[1] - following[0])
        width[[0, -1]] /= 2
        moved = norm.pdf((following[:, None] - grid) / sd) / sd
        grid, density, last = following, (moved @ density) * width, fraction
        values.append(z)
    return values


def level_at(fractions: Sequence[float], alpha: float) -> float:
    """The nominal one-sided level of the last of these looks: what its bounds use in place of alpha."""
    return float(norm.sf(critical_values(fractions, alpha)[-1]))
