"""Stress on real memory: right sums under delays, and every stop told on every rank; delay plans shrink and travel."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from validation.sync import stressing
from validation.sync.evidence import upper_bound
from validation.sync.rank_process import payload
from validation.sync.replays import delays_document, plan_of
from validation.sync.stress import Outcome, stress
from validation.sync.stress_plan import KINDS, MAGNITUDES, POINTS, Delay, StressPlan, plan_from, with_delays

QUIET = StressPlan(ranks=2, steps=40, seed=3, limit_ms=20_000)
SHORT = replace(QUIET, limit_ms=400)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """One set of processes runs all jobs; the one with the kill comes last."""
    jobs = {
        "quiet": QUIET,
        "delayed": with_delays(QUIET, 0.5),
        "stalled": replace(SHORT, stop=(0, 7)),
        "disagreed": replace(SHORT, odd_one=(1, 7)),
        "flag first": with_delays(
            replace(SHORT, fault="sync-flag-before-data", kinds=("one_shot",), limit_ms=1_000), 1.0
        ),
        "killed": replace(SHORT, stop=(0, 7), kill=True),
    }
    return dict(zip(jobs, stress(list(jobs.values())), strict=True))


def said(outcome: Outcome, rank: int) -> dict[str, Any]:
    found = outcome.ranks[rank]
    assert found is not None
    return found


def test_delays_change_no_bit(outcomes: dict[str, Outcome]) -> None:
    quiet, delayed = outcomes["quiet"], outcomes["delayed"]
    assert quiet.clean, quiet.errors
    assert delayed.clean, delayed.errors
    assert quiet.digest == delayed.digest
    assert sum(quiet.applied().values()) == 0
    assert all(count > 0 for count in delayed.applied().values())


def test_a_stalled_rank_ends_the_step_on_all_ranks_in_time_and_by_name(outcomes: dict[str, Outcome]) -> None:
    stalled = outcomes["stalled"]
    assert [said(stalled, rank)["kind"] for rank in (0, 1)] == ["RankAborted", "RankTimeout"]
    assert "rank 1, slot 0, epoch 8: rank 0 did not answer within 400 ms in step 7" in said(stalled, 1)["error"]
    # A second is what a loaded host may leave a process unscheduled.
    assert 400 <= said(stalled, 1)["waited_ms"] <= 1_400


def test_a_killed_rank_ends_the_step_on_the_others(outcomes: dict[str, Outcome]) -> None:
    killed = outcomes["killed"]
    assert killed.ranks[0] is None
    assert said(killed, 1)["kind"] == "RankTimeout"
    assert not killed.clean


def test_a_rank_that_decides_otherwise_is_named_before_anybody_runs_the_step(outcomes: dict[str, Outcome]) -> None:
    for rank in (0, 1):
        assert said(outcomes["disagreed"], rank)["kind"] == "RankDisagreed"
        assert f"rank {1 - rank} decided otherwise about step 7" in said(outcomes["disagreed"], rank)["error"]


def test_a_flag_before_its_data_is_caught_on_real_memory(outcomes: dict[str, Outcome]) -> None:
    assert not outcomes["flag first"].clean
    kinds = {said(outcomes["flag first"], rank)["kind"] for rank in (0, 1)}
    # What is read too early may be a sum or another rank's decision.
    assert kinds & {"WrongResult", "RankDisagreed"}


def test_a_rank_process_starts_without_torch() -> None:
    """It takes seconds to import, for each rank of each set."""
    code = "import sys, validation.sync.rank_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_jobs_that_cannot_share_processes_are_refused() -> None:
    for plans in ([QUIET, replace(QUIET, ranks=3)], [replace(QUIET, kill=True), QUIET]):
        with pytest.raises(ValueError, match="one number of ranks, and a job with a kill is the last"):
            stress(plans)


def test_payload_differs_by_rank_call_tile_piece_and_position() -> None:
    seen = [
        float(value)
        for rank in range(2)
        for call in range(20)
        for tile in range(3)
        for piece in range(2)
        for value in payload(rank, call, tile, piece).view(np.float32)
    ]
    assert len(set(seen)) == len(seen)


def test_a_plan_is_a_function_of_its_seed_and_delays_every_point() -> None:
    plan = with_delays(replace(QUIET, steps=200), 0.5)
    assert plan == with_delays(replace(QUIET, steps=200), 0.5)
    assert plan != with_delays(replace(QUIET, steps=200, seed=4), 0.5)
    assert {delay.point for delay in plan.delays} == set(POINTS)
    assert {delay.microseconds for delay in plan.delays} == set(MAGNITUDES)
    kinds, tiles = zip(*plan.calls(), strict=True)
    assert set(kinds) == set(KINDS)
    assert set(tiles) == {1, 2}


def test_a_plan_is_the_same_from_its_file() -> None:
    plan = replace(with_delays(QUIET, 0.2), stop=(0, 3), fault="sync-one-slot")
    assert plan_of(json.loads(json.dumps(delays_document(plan)))) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 10_000}, "ranks is '10000', a whole number from 0 to 16"),
        ({"kinds": ["four_shot"]}, "kinds is a list of one_shot"),
        ({"stop": [1]}, "stop and odd_one are null or"),
        ({"delays": [{"step": 1}]}, "a delay has the keys"),
        ({"kill": "yes"}, "kill is true or false"),
        ({"more": 1}, "a stress plan has the keys"),
    ],
)
def test_a_plan_of_another_form_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from(json.loads(json.dumps(QUIET.document())) | change)


def test_a_failing_plan_is_reduced_to_the_delay_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    culprit = Delay(4, 1, "flag", 0, 3000)
    monkeypatch.setattr(stressing, "fails", lambda plan: culprit in plan.delays)
    plan = replace(QUIET, delays=tuple(sorted({culprit, *with_delays(replace(QUIET, steps=5), 0.9).delays})))
    assert stressing.smallest(plan).delays == (culprit,)


def test_a_failure_that_does_not_come_again_keeps_its_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stressing, "fails", lambda plan: False)
    plan = with_delays(QUIET, 0.5)
    assert stressing.smallest(plan) == plan


def test_no_failure_in_n_steps_bounds_the_rate_by_three_over_n() -> None:
    for n in (100, 10_000):
        assert 2.9 / n < upper_bound(0, n) < 3 / n
    assert upper_bound(5, 5) == 1.0
    assert upper_bound(1, 10_000) > upper_bound(0, 10_000)
