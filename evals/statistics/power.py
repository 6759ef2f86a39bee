"""What an eval can decide: power, minimum detectable effect, and the repeats that would decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2, norm

from evals.statistics.counts import sums_over_items
from evals.statistics.noninferiority import Evidence, reach

_FEW = 400.0
"""Expected discordant pairs up to which they are counted one by one. Beyond, a normal mean is close enough: a count's
skewness is below 1/20, and half a step of the count, which is allowed for, is a fortieth of its deviation."""

_MEANS = 4001
_MIDDLE = (np.arange(15) + 0.5) / 15
"""Points that stand for the distribution of a mean, and probabilities whose quantiles stand for that of a variance."""

_MOST_REPEATS = 100_000


@dataclass(frozen=True)
class Chances:
    """Probabilities under a true damage: GO, NO-GO, and that the lower bound is above 0, so damage is shown at all."""

    go: float
    no_go: float
    shown: float


def chances(seen: Evidence, margin: float, alpha: float = 0.05, damage: float = 0.0) -> Chances:
    """How a decision at `margin` would turn out, were the true damage `damage` and the noise as in `seen`.

    The noise is that of equal arms; a damage adds its own lost pairs. Few discordant pairs are counted exactly (every
    pair is lost, gained or neither by itself, and several may meet on an item). Many are a normal mean, and the
    estimated variance has the spread of a chi-square.
    """
    outlook = _outlook(seen, alpha, damage)
    if outlook is None:
        return Chances(0.0, 0.0, 0.0)
    lower, upper, weight = outlook
    return Chances(
        go=float(weight[upper <= margin].sum()),
        no_go=float(weight[lower > margin].sum()),
        shown=float(weight[lower > 0].sum()),
    )


def _outlook(seen: Evidence, alpha: float, damage: float) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Lower and upper bounds that a run may end with, and their probabilities; None where nothing can be bounded."""
    pairs = 1 / seen.step
    noise = float(seen.variance) * pairs**2 / seen.jump**2
    expected, net = noise + abs(damage) * pairs / seen.jump, damage * pairs / seen.jump
    if not math.isfinite(expected) or seen.freedom < 1:
        return None
    # More than all pairs cannot move: such a spread is that of items, and no count.
    if expected <= min(_FEW, pairs):
        mean, variance, weight = _counted(expected, net, round(pairs), round(seen.freedom) + 1)
        mean, variance, half = mean * seen.jump, variance * seen.jump**2, 0.0
    else:
        mean, variance, weight = _normal(expected * seen.jump**2 / pairs**2, damage, seen.freedom)
        half = seen.step * seen.jump / 2
    distance = reach(np.maximum(variance, 0.0), seen.freedom, seen.step, alpha) - half
    return mean - distance, mean + distance, weight


def _counted(discordant: float, net: float, pairs: int, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lost, gained = (discordant + net) / 2, max(0.0, (discordant - net) / 2)
    surplus, squares, weight = sums_over_items(lost, gained, pairs, items)
    return surplus / pairs, squares * items / (items - 1) / pairs**2, weight


def _chi_square(freedom: float) -> np.ndarray:
    """Equally likely values of a chi-square variate over its degrees of freedom."""
    return np.asarray(chi2.ppf(_MIDDLE, freedom) / freedom)


def _normal(variance: float, damage: float, freedom: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    means = damage + math.sqrt(variance) * norm.ppf((np.arange(_MEANS) + 0.5) / _MEANS)
    weight = np.full((_MEANS, _MIDDLE.size), 1 / (_MEANS * _MIDDLE.size))
    return means[:, None], variance * _chi_square(freedom), weight


def minimum_detectable(seen: Evidence, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest margin at which equal arms get GO with probability `power`; infinite where there is none.

    It is also about the smallest damage that is told from none with that probability.
    """
    outlook = _outlook(seen, alpha, 0.0)
    if outlook is None:
        return math.inf
    _, upper, weight = (part.ravel() for part in outlook)
    order = np.argsort(upper)
    enough = np.searchsorted(np.cumsum(weight[order]), power)
    return float(upper[order[enough]]) if enough < order.size and upper[order[enough]] <= 1 else math.inf


@dataclass(frozen=True)
class Noise:
    """Variance of a pair's difference around its item's, and of the items' own true ones; `jump` is `Evidence`'s."""

    within: float
    between: float
    jump: float = 1.0


def noise(differences: list[list[float]]) -> Noise:
    """Both variances from the paired differences, item by item; unseen noise counts as one discordant pair.

    Without repeats the two cannot be told apart; all of it is then taken to be `within`, which more repeats reduce.
    """
    repeated = [np.var(d, ddof=1) for d in differences if len(d) > 1]
    means = np.array([np.mean(d) for d in differences])
    pairs = sum(map(len, differences))
    spread = float(means.var(ddof=1)) if means.size > 1 else 0.0
    within = float(np.mean(repeated)) if repeated else spread
    between = max(0.0, spread - within * len(means) / pairs) if repeated else 0.0
    return Noise(max(within, 1 / pairs), between, jump(differences))


def jump(differences: list[list[float]]) -> float:
    """How far pairs that moved went, so that counting them gives the second and fourth moments that were seen."""
    squares = np.concatenate([np.asarray(d, dtype=np.float64) for d in differences]) ** 2
    return math.sqrt(float((squares**2).sum() / squares.sum())) if squares.any() else 1.0


def designed(noise: Noise, items: int, repeats: int, distinct: bool = True) -> Evidence:
    """The evidence that a design expects from equal arms; `distinct` is False where repeats repeat the same answer."""
    variance = (noise.between + noise.within / (repeats if distinct else 1)) / items
    return Evidence(0.0, variance, items - 1, 1 / (items * (repeats if distinct else 1)), noise.jump)


def repeats_needed(
    noise: Noise, items: int, margin: float, alpha: float = 0.05, power: float = 0.8, most: int = _MOST_REPEATS
) -> int | None:
    """The fewest repeats with which equal arms get GO at `margin` with probability `power`.

    None where `most` would not do: damage then falls so differently on items that only more items decide.
    """

    def enough(repeats: int) -> bool:
        return chances(designed(noise, items, repeats), margin, alpha).go >= power

    def about(repeats: int) -> bool:
        """As `enough`, with a normal mean and a known variance: near it and cheap."""
        seen = designed(noise, items, repeats)
        away = reach(seen.variance, seen.freedom, seen.step, alpha) + norm.ppf(power) * math.sqrt(seen.variance)
        return bool(away <= margin)

    guess = _fewest(about, 0, 1, most)
    # The exact answer is mostly within a tenth of the guess.
    return None if guess is None else _fewest(enough, guess * 9 // 10 - 1, guess, most)


def _fewest(enough: Callable[[int], bool], low: int, high: int, most: int) -> int | None:
    """The fewest repeats that are enough, about `low` to `high`; None where `most` are not."""
    while low > 0 and enough(low):
        low, high = low // 2, low
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    low = max(low, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
