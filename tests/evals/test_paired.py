"""Exact tests of paired outcomes agree with scipy and statsmodels; looks with published boundaries."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import binom, permutation_test
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests

from evals.statistics import (
    bootstrap_mean,
    cluster_bootstrap,
    critical_values,
    holm,
    level_at,
    mcnemar,
    mcnemar_worse,
    permutation_worse,
    pooled_permutation_worse,
    spent,
)

CHANCE = 1e-4
"""Chance that a simulation of a procedure that holds its level exceeds the count asked for."""


@pytest.mark.parametrize("items", [3, 8, 12])
def test_the_permutation_test_of_few_items_is_exact_as_scipys(items: int) -> None:
    damage = np.random.default_rng(items).normal(0.3, 1, items)
    reference = permutation_test(
        (damage, np.zeros(items)), lambda x, y: np.mean(x - y), permutation_type="samples", alternative="greater"
    )
    assert permutation_worse(damage, seed=0) == pytest.approx(reference.pvalue)


def test_the_permutation_test_of_many_items_draws_signs_and_is_close_to_students() -> None:
    from scipy.stats import ttest_1samp

    damage = np.random.default_rng(1).normal(0.1, 1, 200)
    p = permutation_worse(damage, seed=0)
    expected = ttest_1samp(damage, 0, alternative="greater").pvalue
    assert abs(p - expected) < 4 * math.sqrt(expected / 10_000)  # four deviations of 10,000 drawn patterns
    assert permutation_worse(np.ones(200), seed=0) == pytest.approx(1 / 10_001)
    assert permutation_worse(np.zeros(200), seed=0) == 1.0


def test_the_permutation_test_holds_its_level_on_10000_equal_runs() -> None:
    """Equal arms, eight items that differ by 1: the exact p-values are those of a binomial count."""
    rng = np.random.default_rng(2)
    counts = rng.binomial(8, 0.5, 10_000)
    p = np.array([permutation_worse([1.0] * k + [-1.0] * (8 - k), seed=0) for k in range(9)])
    assert np.sum(p[counts] <= 0.05) <= binom.isf(CHANCE, 10_000, 0.05)
    assert [permutation_worse([1.0] * k + [-1.0] * (8 - k), seed=0) for k in range(9)] == pytest.approx(
        [mcnemar_worse(k, 8 - k) for k in range(9)]
    )


def test_the_pooled_test_gives_every_eval_the_same_weight() -> None:
    one, many = [1.0] * 4, [0.0] * 400
    assert pooled_permutation_worse([one, many], seed=0) == permutation_worse(one, seed=0)
    assert pooled_permutation_worse([[1.0, -1.0], [0.5, 0.5]], seed=0) == permutation_worse([1, -1, 0.5, 0.5], seed=0)


@pytest.mark.parametrize(("lost", "gained"), [(5, 0), (5, 2), (0, 4), (12, 12), (30, 11)])
def test_mcnemar_is_exact_as_statsmodels(lost: int, gained: int) -> None:
    reference = statsmodels_mcnemar([[50, lost], [gained, 20]], exact=True).pvalue
    assert mcnemar(lost, gained) == pytest.approx(reference)


def test_five_pairs_lost_and_none_gained_are_the_fewest_that_show_a_loss() -> None:
    assert mcnemar_worse(5, 0) == pytest.approx(1 / 32)
    assert mcnemar_worse(4, 0) == pytest.approx(1 / 16)
    assert mcnemar(0, 0) == mcnemar_worse(0, 0) == 1.0
    with pytest.raises(ValueError, match="counts >= 0"):
        mcnemar(-1, 0)


def test_holm_agrees_with_statsmodels() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 9):
        p = list(rng.uniform(size=n) ** 2)
        assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])
    with pytest.raises(ValueError, match="probabilities are needed"):
        holm([1.2])


def test_holm_keeps_the_family_wise_error_of_10000_runs() -> None:
    p = np.random.default_rng(4).uniform(size=(10_000, 4))
    rejected = sum(min(holm(list(row))) <= 0.05 for row in p)
    assert rejected <= binom.isf(CHANCE, 10_000, 0.05)


def test_looks_have_the_published_boundaries() -> None:
    """Five equal looks at one-sided 0.025, as tabulated for Lan and DeMets' O'Brien-Fleming-type spending."""
    assert critical_values([0.2, 0.4, 0.6, 0.8, 1.0], 0.025) == pytest.approx(
        [4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=1e-3
    )
    assert critical_values([1.0], 0.05) == pytest.approx([NormalDist().inv_cdf(0.95)], abs=1e-6)
    assert level_at([1.0], 0.05) == pytest.approx(0.05)
    assert level_at([0.5, 1.0], 0.05) < 0.05


def test_looking_five_times_costs_no_false_alarms_in_10000_runs_and_without_spending_it_would() -> None:
    rng = np.random.default_rng(5)
    fractions = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    z = np.cumsum(rng.normal(0, np.sqrt(0.2), (10_000, 5)), axis=1) / np.sqrt(fractions)
    alarms = np.sum((z > critical_values(list(fractions), 0.05)).any(axis=1))
    assert binom.ppf(CHANCE, 10_000, 0.05) <= alarms <= binom.isf(CHANCE, 10_000, 0.05)
    assert np.sum((z > NormalDist().inv_cdf(0.95)).any(axis=1)) > 2 * 500


def test_a_spending_function_spends_all_at_the_end_and_little_before() -> None:
    assert spent(1.0, 0.05) == pytest.approx(0.05)
    assert spent(0.2, 0.05) < 0.0001
    for wrong in (0.0, 1.1):
        with pytest.raises(ValueError, match="fraction"):
            spent(wrong, 0.05)
    with pytest.raises(ValueError, match="rising"):
        critical_values([0.5, 0.5], 0.05)


def test_a_cluster_bootstrap_covers_where_repeats_move_together_and_a_plain_one_does_not() -> None:
    """Forty items of 8 equal repeats are 40 observations, not 320; 95 % bounds hold in 95 % of 400 data sets."""
    rng = np.random.default_rng(6)
    clustered = plain = 0
    names = [i for i in range(40) for _ in range(8)]
    for seed in range(400):
        values = np.repeat(rng.normal(size=40), 8)
        clustered += cluster_bootstrap(values, names, 0.05, seed, 1000).upper >= 0
        plain += bootstrap_mean(values, 0.05, seed, 1000).upper >= 0
    assert binom.ppf(CHANCE, 400, 0.95) <= clustered
    assert plain < binom.ppf(CHANCE, 400, 0.95)


def test_clusters_of_one_are_a_plain_bootstrap_and_uneven_ones_weigh_by_size() -> None:
    values = list(np.random.default_rng(7).normal(size=20))
    assert cluster_bootstrap(values, range(20), 0.05, 3) == bootstrap_mean(values, 0.05, 3)
    uneven = cluster_bootstrap([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"], 0.05, 0)
    assert (uneven.mean, uneven.n) == (0.75, 2)
    with pytest.raises(ValueError, match="a cluster each"):
        cluster_bootstrap([1.0], ["a", "b"], 0.05, 0)
