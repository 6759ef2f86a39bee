"""Bounds of a mean hold as often as they say, by simulation; seeds repeat; bad input is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom

from evals.statistics import bootstrap_mean

DATA_SETS = 400
CHANCE = 1e-4
"""Chance that a simulation of a procedure that holds its level falls below the least coverage asked for."""

Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(generator: np.random.Generator, n: int) -> np.ndarray:
    return generator.normal(size=n)


def exponential(generator: np.random.Generator, n: int) -> np.ndarray:
    """Skewed to the right; its mean is 1."""
    return generator.exponential(size=n)


def coverage(draw: Draw, n: int, mean: float, alpha: float) -> tuple[int, int]:
    """In how many of the data sets the lower and the upper bound hold."""
    lower = upper = 0
    for seed in range(DATA_SETS):
        bounds = bootstrap_mean(draw(np.random.default_rng([n, seed]), n), alpha, seed, resamples=1000)
        lower += bounds.lower <= mean
        upper += bounds.upper >= mean
    return lower, upper


def least(nominal: float) -> int:
    """Data sets in which a bound that holds with probability `nominal` holds at least, but for `CHANCE`."""
    return int(binom.ppf(CHANCE, DATA_SETS, nominal))


@pytest.mark.parametrize("alpha", [0.05, 0.2])
@pytest.mark.parametrize("n", [8, 32])
def test_either_bound_holds_as_often_as_it_says_on_normal_data(n: int, alpha: float) -> None:
    most = DATA_SETS - int(binom.ppf(CHANCE, DATA_SETS, alpha))
    for held in coverage(normal, n, 0.0, alpha):
        assert least(1 - alpha) <= held <= most


@pytest.mark.parametrize("n", [8, 32])
def test_on_skewed_data_the_bound_away_from_the_tail_holds_and_the_other_errs_at_most_three_times_as_often(
    n: int,
) -> None:
    """An exponential of 8 entries was seen at 0.87 for 0.95: the tail is often absent from so few."""
    lower, upper = coverage(exponential, n, 1.0, 0.05)
    assert lower >= least(0.95)
    assert least(1 - 3 * 0.05) <= upper < lower


def test_plain_percentiles_would_miss_their_level_on_few_entries() -> None:
    """What the expansion is for: without it the bounds of 8 entries fail this file's own test."""
    held = 0
    for seed in range(DATA_SETS):
        data = normal(np.random.default_rng([8, seed]), 8)
        draws = np.random.default_rng(seed).integers(0, 8, size=(1000, 8))
        held += np.quantile(data[draws].mean(axis=1), 0.95) >= 0.0
    assert held < coverage(normal, 8, 0.0, 0.05)[1]


def test_more_confidence_and_fewer_entries_widen_the_bounds() -> None:
    data = normal(np.random.default_rng(0), 64)
    loose, strict = (bootstrap_mean(data, alpha, seed=0) for alpha in (0.2, 0.01))
    assert strict.lower < loose.lower < loose.mean < loose.upper < strict.upper
    few = bootstrap_mean(data[:8], 0.2, seed=0)
    assert few.upper - few.lower > loose.upper - loose.lower


def test_the_same_seed_gives_the_same_bounds_and_another_seed_others() -> None:
    data = exponential(np.random.default_rng(0), 20)
    assert bootstrap_mean(data, 0.05, seed=3) == bootstrap_mean(data, 0.05, seed=3)
    one, other = bootstrap_mean(data, 0.05, seed=3), bootstrap_mean(data, 0.05, seed=4)
    assert one.upper != other.upper
    assert one.mean == other.mean == float(np.mean(data))
    assert (one.n, one.alpha) == (20, 0.05)


def test_equal_entries_have_no_spread() -> None:
    bounds = bootstrap_mean([0.5, 0.5, 0.5], 0.05, seed=0)
    assert bounds.lower == bounds.mean == bounds.upper == 0.5


def test_a_single_entry_has_no_bounds() -> None:
    bounds = bootstrap_mean([2.0], 0.05, seed=0)
    assert (bounds.mean, bounds.lower, bounds.upper, bounds.n) == (2.0, -math.inf, math.inf, 1)


@pytest.mark.parametrize(
    ("values", "alpha", "reason"),
    [
        ([], 0.05, "needs finite values, got 0"),
        ([1.0, math.nan], 0.05, "got 2 of which 1 are not"),
        ([math.inf], 0.05, "got 1 of which 1 are not"),
        ([1.0, 2.0], 0.0, "alpha is 0.0"),
        ([1.0, 2.0], 0.5, "alpha is 0.5"),
        ([1.0, 2.0], math.nan, "alpha is nan"),
    ],
)
def test_what_cannot_be_bounded_is_refused(values: list[float], alpha: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        bootstrap_mean(values, alpha, seed=0)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.00625), (4, 0.01), (2, 0.05)])
def test_bounds_of_very_few_entries_hold_where_a_percentile_ends_at_the_largest_of_them(n: int, alpha: float) -> None:
    """Three entries of noise are all below 0 in one case of eight, whatever percentile of their means is taken."""
    for held in coverage(normal, n, 0.0, alpha):
        assert held >= least(1 - alpha)
    alone = sum(float(normal(np.random.default_rng([n, seed]), n).max()) >= 0.0 for seed in range(DATA_SETS))
    assert alone < least(1 - alpha)


def test_three_prompts_that_lose_drafts_by_chance_are_no_finding() -> None:
    """Accepted drafts a step, candidate less baseline, of a clean run that was called wrong."""
    assert bootstrap_mean([-0.475, -0.196, -0.375], 0.00625, seed=1).upper > 0
