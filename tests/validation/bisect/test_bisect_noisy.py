"""Bayesian bisection of 200 commits, simulated: how often it is right, and in how many runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from validation.bisect.commits.bayes import standing
from validation.bisect.commits.state import Outcome, Trial

TRIALS, COMMITS, POSTERIOR = 40, 200, 0.99
HISTORY = [f"{number:040x}" for number in range(COMMITS + 1)]
"""A good commit and 200 candidates; the last is bad."""

Verdict = Callable[[bool, random.Random], bool]
"""Whether a run fails, from whether the commit is bad."""


def a_quarter_is_a_coins(bad: bool, chance: random.Random) -> bool:
    return chance.random() < 0.5 if chance.random() < 0.25 else bad


def a_bad_commit_passes_a_quarter_of_the_time(bad: bool, chance: random.Random) -> bool:
    return bad and chance.random() >= 0.25


def a_quarter_is_wrong(bad: bool, chance: random.Random) -> bool:
    return bad != (chance.random() < 0.25)


@dataclass(frozen=True)
class Score:
    """Share of the trials in which the culprit was named, and runs per trial."""

    found: float
    runs: float


def bayes(verdict: Verdict, wrong: float | None = None, trials: int = TRIALS) -> Score:
    found, runs = 0, 0
    for seed in range(trials):
        chance = random.Random(f"bayes {seed}")
        culprit, seen = chance.randint(1, COMMITS), list[Trial]()
        now = standing(HISTORY, seen, POSTERIOR, wrong)
        while min(now.posterior, now.change) < POSTERIOR and now.change > 1 - POSTERIOR:
            fails = verdict(HISTORY.index(now.next_commit) >= culprit, chance)
            outcome = Outcome.BAD if fails else Outcome.GOOD
            seen.append(Trial(commit=now.next_commit, outcome=outcome, why="", seconds=0, log=""))
            now = standing(HISTORY, seen, POSTERIOR, wrong)
        found += now.change >= POSTERIOR and now.suspects == (HISTORY[culprit],)
        runs += len(seen)
    return Score(found / trials, runs / trials)


def majority_of_5(verdict: Verdict, trials: int = 2000) -> Score:
    found, runs = 0, 0
    for seed in range(trials):
        chance = random.Random(f"majority {seed}")
        culprit, good, bad = chance.randint(1, COMMITS), 0, COMMITS
        while bad - good > 1:
            middle = (good + bad) // 2
            fails = sum(verdict(middle >= culprit, chance) for _ in range(5)) >= 3
            good, bad = (good, middle) if fails else (middle, bad)
            runs += 5
        found += bad == culprit
    return Score(found / trials, runs / trials)


@pytest.mark.parametrize("verdict", [a_quarter_is_a_coins, a_bad_commit_passes_a_quarter_of_the_time])
def test_25_percent_flaky_verdicts_find_it_in_95_percent_of_40_trials_in_fewer_runs_than_majority_of_5(
    verdict: Verdict,
) -> None:
    ours, plain = bayes(verdict), majority_of_5(verdict)
    print(f"\n{verdict.__name__}: bayes {ours}, majority of 5 {plain}")
    assert ours.found >= 0.95
    assert ours.runs < plain.runs


def test_25_percent_wrong_verdicts_find_it_in_95_percent_of_40_trials_in_fewer_runs_per_culprit_found() -> None:
    ours, plain = bayes(a_quarter_is_wrong, wrong=0.25), majority_of_5(a_quarter_is_wrong)
    print(f"\na quarter is wrong: bayes {ours}, majority of 5 {plain}")
    assert ours.found >= 0.95
    # Whoever runs five times a commit runs less, and is wrong more often than right.
    assert plain.found < 0.5
    assert ours.runs / ours.found < plain.runs / plain.found


def test_verdicts_that_never_err_need_few_runs_more_than_git_bisect() -> None:
    score = bayes(lambda bad, chance: bad, trials=10)
    assert score.found == 1
    assert score.runs <= 8 + 12


def test_no_change_is_not_made_into_one() -> None:
    for rate in (0.0, 0.3):
        chance, seen = random.Random(f"none {rate}"), list[Trial]()
        for _ in range(60):
            now = standing(HISTORY[:20], seen, POSTERIOR, None)
            assert min(now.posterior, now.change) < POSTERIOR
            outcome = Outcome.BAD if chance.random() < rate else Outcome.GOOD
            seen.append(Trial(commit=now.next_commit, outcome=outcome, why="", seconds=0, log=""))


def test_where_nothing_changed_the_search_ends_in_few_runs() -> None:
    for fails in (False, True):
        seen, now = list[Trial](), standing(HISTORY, [], POSTERIOR, None)
        while now.change > 1 - POSTERIOR:
            outcome = Outcome.BAD if fails else Outcome.GOOD
            seen.append(Trial(commit=now.next_commit, outcome=outcome, why="", seconds=0, log=""))
            now = standing(HISTORY, seen, POSTERIOR, None)
        assert len(seen) <= 20


def test_a_single_candidate_is_not_taken_without_evidence() -> None:
    now = standing(HISTORY[:2], [], POSTERIOR, None)
    assert (now.suspects, now.posterior) == ((HISTORY[1],), 1.0)
    assert now.change == pytest.approx(0.5)
