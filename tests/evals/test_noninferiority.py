"""The decision about a margin errs as often as it says, on 10,000 simulated runs of every kind of damage."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import beta, binom

from evals.statistics import (
    Evidence,
    Outcome,
    aa_rates,
    chances,
    decide,
    designed,
    evidence,
    jump,
    lower_bound,
    minimum_detectable,
    noise,
    p_beyond,
    p_within,
    pooled,
    repeats_needed,
    upper_bound,
)
from evals.statistics.counts import sums_over_items

RUNS = 10_000
CHANCE = 1e-4
"""Chance that a simulation of a procedure that holds its level exceeds the count asked for."""

MOST_FALSE = int(binom.isf(CHANCE, RUNS, 0.05)) / RUNS
POWER_RUNS = 40_000
POWER_OFF = 0.02
"""How far printed power may be from what is seen: two points, as promised. The simulation's own error is a quarter."""


def runs(items: int, repeats: int, lost: object, gained: object, count: int = RUNS, seed: int = 0) -> Evidence:
    """Evidence of simulated runs: every pair is lost, gained or neither, with its item's probabilities."""
    rng = np.random.default_rng(seed)
    p, q = (np.broadcast_to(np.asarray(x, float), (items,)) for x in (lost, gained))
    losses = rng.binomial(repeats, p, (count, items))
    gains = rng.binomial(repeats - losses, q / (1 - p))
    return evidence((losses - gains) / repeats, items * repeats)


FEW_ITEMS_SUFFER = np.r_[np.full(3, 1 / 3), np.zeros(47)]
DAMAGES = {
    "one way, many repeats": (30, 32, 0.02, 0.0),
    "one way, one repeat": (24, 1, 0.15, 0.0),
    "both ways": (30, 32, 0.05, 0.03),
    "greedy": (198, 1, 0.04, 0.02),
    "arms that share their random numbers": (50, 8, 0.0225, 0.0025),
    "few items suffer": (50, 8, FEW_ITEMS_SUFFER, 0.0),
    "unlike items": (30, 64, np.linspace(0.0, 0.14, 30), np.linspace(0.0, 0.10, 30)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_at_the_margin_go_and_no_go_are_false_alarms_and_rare(kind: str) -> None:
    items, repeats, lost, gained = DAMAGES[kind]
    seen = runs(items, repeats, lost, gained)
    margin = float(np.mean(np.broadcast_to(lost, (items,))) - np.mean(np.broadcast_to(gained, (items,))))
    rounding = 1e-12
    assert np.mean(upper_bound(seen) <= margin - rounding) <= MOST_FALSE
    assert np.mean(lower_bound(seen) > margin + rounding) <= MOST_FALSE


def test_a_plain_t_bound_would_pass_rare_losses_too_often() -> None:
    """What the step is for: 150 pairs at a true loss of 2 % show none at all in one run of twenty."""
    seen = runs(150, 1, 0.02, 0.0)
    plain = Evidence(seen.mean, seen.variance, seen.freedom, 0.0)
    assert np.mean(upper_bound(plain) <= 0.02) > MOST_FALSE >= np.mean(upper_bound(seen) <= 0.02)


DESIGNS = {
    "aime, 32 repeats": (30, 32, 0.045, 0.02),
    "aime, 64 repeats": (30, 64, 0.045, 0.02),
    "gpqa, 8 repeats": (198, 8, 0.06, 0.02),
    "nightly": (50, 8, 0.005, 0.02),
    "nightly, noisier": (50, 16, 0.01, 0.02),
    "premerge": (24, 1, 0.01, 0.2),
}


@pytest.mark.parametrize("design", DESIGNS)
def test_power_is_as_printed_within_two_points_for_equal_arms_and_for_a_damage(design: str) -> None:
    items, repeats, each_way, margin = DESIGNS[design]
    pairs = items * repeats
    printed_from = Evidence(0.0, 2 * each_way / pairs, items - 1, 1 / pairs)
    equal, printed = runs(items, repeats, each_way, each_way, POWER_RUNS), chances(printed_from, margin)
    assert abs(np.mean(upper_bound(equal) <= margin) - printed.go) <= POWER_OFF
    assert np.mean(lower_bound(equal) > 0) <= MOST_FALSE
    assert np.mean(lower_bound(equal) > margin) <= min(MOST_FALSE, printed.no_go + POWER_OFF)
    hurt = runs(items, repeats, each_way + margin, each_way, POWER_RUNS)
    printed = chances(printed_from, margin, damage=margin)
    assert abs(np.mean(lower_bound(hurt) > 0) - printed.shown) <= POWER_OFF
    assert np.mean(upper_bound(hurt) <= margin) <= MOST_FALSE


@pytest.mark.parametrize("each_way", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("repeats", [1, 2, 8])
@pytest.mark.parametrize("items", [3, 6, 12, 40])
def test_power_is_as_printed_within_two_points_where_few_items_move(items: int, repeats: int, each_way: float) -> None:
    """At margins that a tenth to nine tenths of the runs meet. Six items asked twice were printed 14 points too low."""
    pairs = items * repeats
    printed_from = Evidence(0.0, 2 * each_way / pairs, items - 1, 1 / pairs)
    bounds = np.sort(upper_bound(runs(items, repeats, each_way, each_way, POWER_RUNS)))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        margin = float(bounds[int(share * POWER_RUNS)]) + 1e-9
        seen = np.searchsorted(bounds, margin) / POWER_RUNS
        assert abs(seen - chances(printed_from, margin).go) <= POWER_OFF, (share, margin)


@pytest.mark.parametrize(("items", "pairs", "lost", "gained"), [(2, 4, 0.8, 0.4), (3, 5, 2.5, 0.5), (3, 3, 0.3, 0.0)])
def test_counts_over_items_have_the_probabilities_of_every_way_in_which_pairs_can_fall(
    items: int, pairs: int, lost: float, gained: float
) -> None:
    chance = {1: lost / pairs, -1: gained / pairs, 0: 1 - (lost + gained) / pairs}
    expected: dict[tuple[int, float], float] = {}
    for ways in product(chance, repeat=pairs):
        x = [sum(ways[i::items]) for i in range(items)]
        outcome = sum(x), round(sum(n * n for n in x) - sum(x) ** 2 / items, 9)
        expected[outcome] = expected.get(outcome, 0.0) + math.prod(chance[way] for way in ways)
    got = {
        (int(total), round(float(squares), 9)): float(weight)
        for total, squares, weight in zip(*sums_over_items(lost, gained, pairs, items), strict=True)
    }
    assert got == pytest.approx({k: v for k, v in expected.items() if v > 1e-12}, abs=1e-9)


RATIOS = {
    "few answers": (30, 1, 0.05, 0.11),
    "mrcr, one repeat": (200, 1, 0.05, 0.018),
    "nightly": (40, 8, 0.1, 0.0125),
}
RATIOS_OFF = 0.04
"""Ratios move a little everywhere; they are counted as moves of one size, which is coarser than right and wrong."""


@pytest.mark.parametrize("design", RATIOS)
def test_power_of_scores_that_are_ratios_is_about_as_printed(design: str) -> None:
    """As if each moved by a whole point the first two would be printed 15 points too high."""
    items, repeats, deviation, margin = RATIOS[design]
    moved = np.random.default_rng(0).normal(0, deviation, (RUNS, items, repeats))
    pairs = items * repeats
    printed_from = Evidence(0.0, deviation**2 / pairs, items - 1, 1 / pairs, jump(moved[0].tolist()))
    seen = np.mean(upper_bound(evidence(moved.mean(-1), pairs)) <= margin)
    assert abs(seen - chances(printed_from, margin).go) <= RATIOS_OFF


@pytest.mark.parametrize(("items", "repeats"), [(2, 8), (3, 12), (6, 16), (30, 64)])
def test_items_that_are_lost_in_all_their_repeats_have_a_power_too(items: int, repeats: int) -> None:
    """More spread than independent pairs can have: it is the items'."""
    lost = [[1.0] * repeats, *[[0.0] * repeats] * (items - 1)]
    power = chances(evidence(np.mean(lost, axis=1), items * repeats), 0.02)
    assert all(0 <= chance <= 1 for chance in (power.go, power.no_go, power.shown))
    assert repeats_needed(noise(lost), items, 0.02) is None


def test_the_minimum_detectable_effect_is_the_margin_with_that_power() -> None:
    seen = designed(noise([[0.0, 0.1, -0.1, 0.0]] * 30), 30, 32)
    effect = minimum_detectable(seen, power=0.8)
    assert chances(seen, effect + 1e-9).go >= 0.8 > chances(seen, effect - seen.step).go
    assert minimum_detectable(Evidence(0.0, 1.0, 29, 1 / 30)) == math.inf


def test_the_repeats_said_to_be_needed_decide_and_fewer_do_not() -> None:
    spread = noise(
        [list(np.random.default_rng(i).choice([-1.0, 0.0, 1.0], 16, p=[0.04, 0.92, 0.04])) for i in range(30)]
    )
    needed = repeats_needed(spread, 30, 0.02)
    assert needed is not None
    assert chances(designed(spread, 30, needed), 0.02).go >= 0.8 > chances(designed(spread, 30, needed - 1), 0.02).go


def test_where_items_differ_too_much_no_number_of_repeats_is_promised() -> None:
    unlike = noise([[0.3] * 8, [-0.3] * 8] * 4)
    assert unlike.between > 0
    assert repeats_needed(unlike, 8, 0.02) is None


def test_noise_within_and_between_items_is_told_apart() -> None:
    rng = np.random.default_rng(0)
    between = rng.normal(0, 0.3, 400)
    got = noise([list(mean + rng.normal(0, 0.5, 8)) for mean in between])
    assert got.within == pytest.approx(0.25, rel=0.1)  # 2,800 degrees of freedom: a deviation of 2.7 %
    assert got.between == pytest.approx(0.09, rel=0.3)  # 399 degrees of freedom, with the noise within: 9 %


@pytest.mark.parametrize(("lost", "pairs"), [(0, 24), (0, 960), (1, 100), (3, 400), (10, 400)])
def test_the_bound_of_rare_losses_is_the_exact_one_of_a_count(lost: int, pairs: int) -> None:
    """Against Clopper and Pearson's: the bound rises above it by Student's quantile, and never falls 1 % below."""
    exact = beta.ppf(0.95, lost + 1, pairs - lost)
    got = upper_bound(evidence([1.0] * lost + [0.0] * (pairs - lost), pairs))
    assert 0.99 * exact <= got <= 1.1 * exact


def test_three_outcomes() -> None:
    few = Evidence(0.0, 0.0004, 29, 0.001)
    assert decide(few, 0.05) is Outcome.GO
    assert decide(few, 0.02) is Outcome.UNDECIDED
    assert decide(Evidence(0.1, 0.0004, 29, 0.001), 0.02) is Outcome.NO_GO


def test_p_values_are_the_levels_at_which_the_bounds_touch() -> None:
    seen = Evidence(0.03, 0.0001, 29, 1 / 960)
    for p, bound in ((p_beyond(seen, 0.0), lower_bound), (p_within(seen, 0.06), upper_bound)):
        at = {lower_bound: 0.0, upper_bound: 0.06}[bound]
        assert bound(seen, p) == pytest.approx(at, abs=1e-9)  # the root finder's tolerance in alpha is 1e-12
    assert p_beyond(seen, 0.05) == 0.5
    assert p_beyond(Evidence(1.0, 0.0, 29, 1e-4), 0.0) == pytest.approx(1e-12)  # given as the least that is believed


def test_pooled_evidence_of_equal_evals_has_a_share_of_their_variance() -> None:
    one = Evidence(0.02, 0.0004, 29, 0.001)
    all_three = pooled([one] * 3)
    assert all_three.mean == pytest.approx(0.02)
    assert all_three.variance == pytest.approx(0.0004 / 3)
    assert all_three.freedom == pytest.approx(3 * 29)  # Welch and Satterthwaite for equal parts
    assert all_three.step == pytest.approx(0.001 / 3)


def test_an_a_a_run_is_never_no_go_in_200_runs_and_its_rates_agree_with_power() -> None:
    rng = np.random.default_rng(0)
    for run in range(200):
        equal = rng.choice([-1.0, 0.0, 1.0], (3, 40, 8), p=[0.01, 0.98, 0.01])
        for task in equal:
            assert decide(evidence(task.mean(-1), task.size), 0.02) is not Outcome.NO_GO, run
    rates = aa_rates(equal[0].tolist(), 0.02, 0.05, seed=0)
    assert rates[Outcome.NO_GO] == 0
    assert sum(rates.values()) == pytest.approx(1)
    same = aa_rates([[0.0] * 8] * 40, 0.02, 0.05, seed=0)
    assert same[Outcome.GO] == 1


def test_one_item_bounds_nothing() -> None:
    alone = evidence([0.0], 8)
    assert decide(alone, 0.5) is Outcome.UNDECIDED
    assert chances(alone, 0.5).go == 0


@pytest.mark.parametrize(("damage", "pairs"), [([], 1), ([math.nan], 1), ([0.0, 0.0], 1)])
def test_evidence_that_is_none_is_refused(damage: list[float], pairs: int) -> None:
    with pytest.raises(ValueError, match="items of finite damage"):
        evidence(damage, pairs)
