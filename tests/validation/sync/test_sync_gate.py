"""The sync gate: what passes, what fails, and when its silence counts for nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from small_k3 import context_of

from validation.faults.catalogue import FAULTS
from validation.gates.base import Unit
from validation.gates.parity.gate import ParityGate
from validation.gates.sync.gate import SyncGate
from validation.mutation.plan import can_see, units_for
from validation.profile import load_profile, profile_names
from validation.records.record import PlotDoc
from validation.reports.plots import svg
from validation.sync import sanitizers
from validation.sync.sanitizers import parse
from validation.targets.base import Capability
from validation.verdict import Verdict

GATE = SyncGate()
SETTINGS: dict[str, Any] = {
    "exhaustive_ranks": [2],
    "stall_ranks": [2],
    "walk_ranks": [4],
    "walks": 1,
    "stress_ranks": [2],
    "stress_steps": 20,
    "stress_draws": 1,
}


def measured(*units: str, faults: tuple[str, ...] = (), **settings: Any) -> tuple[dict[str, Any], Any]:
    context = context_of(SETTINGS | settings, faults=tuple(FAULTS[fault] for fault in faults))
    return {unit: GATE.measure(Unit(unit), context) for unit in units}, context


def clean_stress() -> dict[str, Any]:
    error = {"kind": "RankTimeout", "error": "rank 1, slot 0, epoch 3: late", "waited_ms": 510}
    stop = {"limit_ms": 500, "killed": False, "ranks": [error, error]}
    return {
        "ranks": 2,
        "steps": 1000,
        "failures": [],
        "delays": dict.fromkeys(("data", "flag", "wait", "read", "return"), 9),
        "controls": {"sync-no-exit-barrier": {"caught": True, "how": "wrong"}},
        "stopped": {"stalled": stop, "killed": stop | {"killed": True, "ranks": [None, error]}},
    }


def test_a_right_protocol_passes_with_its_states_and_bound_in_one_line() -> None:
    results, context = measured("launches", "collectives-2", "walks-4", "sentinels")
    result = GATE.judge(results | {"stress-2": clean_stress()}, context)
    assert result.verdict is Verdict.PASS
    assert re.search(r"\d+ states in \d+ scenarios", result.summary)
    assert "0 failures in 1000 stressed steps, 95% bound 3.0e-03 a step" in result.summary


def test_a_fault_is_a_finding_with_a_trace_a_picture_and_a_file() -> None:
    results, context = measured("collectives-2", faults=("sync-no-exit-barrier",))
    result = GATE.judge(results, context)
    assert result.verdict is Verdict.FAIL
    assert "in-place-2: agent" in result.findings[0].message
    assert [table.title for table in result.tables if table.title.startswith("Trace")] == ["Trace: in-place-2"]
    assert result.metrics["replays"]["in-place-2"]["kind"] == "sync-trace"
    [plot] = result.plots
    document = PlotDoc(**{key: getattr(plot, key) for key in PlotDoc.model_fields})
    drawing = svg(document, "trace")
    assert drawing.startswith("<svg")
    assert {kind for kind in ("load", "store", "flag") if kind in drawing} == {"load", "store", "flag"}


def test_a_control_that_is_not_caught_makes_the_gate_an_error() -> None:
    context = context_of(SETTINGS)
    blind = clean_stress()
    blind["controls"]["sync-no-exit-barrier"]["caught"] = False
    result = GATE.judge({"stress-2": blind}, context)
    assert result.verdict is Verdict.ERROR
    assert "blind to sync-no-exit-barrier (stress-2)" in result.summary


def test_a_finding_outranks_a_missed_control() -> None:
    results, context = measured("collectives-2", faults=("sync-one-slot",))
    blind = clean_stress()
    blind["controls"]["sync-no-exit-barrier"]["caught"] = False
    assert GATE.judge(results | {"stress-2": blind}, context).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (None, "stalled: rank 1 never came to an end"),
        ({"kind": "", "error": "", "waited_ms": 0}, "stalled: rank 1 says 'nothing'"),
        (
            {"kind": "RankTimeout", "error": "rank 1, slot 0, epoch 3: late", "waited_ms": 9_000},
            "rank 1 waited 9000 ms, 500 ms allowed",
        ),
    ],
)
def test_a_stop_that_a_rank_does_not_tell_in_time_is_a_finding(rank: Any, message: str) -> None:
    stress = clean_stress()
    stress["stopped"]["stalled"]["ranks"] = [stress["stopped"]["stalled"]["ranks"][0], rank]
    result = GATE.judge({"stress-2": stress}, context_of(SETTINGS))
    assert result.verdict is Verdict.FAIL
    assert message in result.findings[0].message


def test_a_failed_step_is_a_finding_with_the_delays_that_are_enough() -> None:
    stress = clean_stress()
    plan = {"kind": "sync-delays", "plan": {"delays": [{"step": 1}]}}
    stress["failures"] = [{"seed": 4, "how": "32 of 32 words are wrong", "replay": plan}]
    result = GATE.judge({"stress-2": stress}, context_of(SETTINGS))
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].message == "2 processes, seed 4: 32 of 32 words are wrong (1 delays)"
    assert result.metrics["replays"] == {"stress-2-4": plan}


def test_exploration_that_was_cut_off_decides_nothing() -> None:
    results, context = measured("launches")
    results["launches"]["scenarios"]["broadcast-3"]["complete"] = False
    assert GATE.judge(results, context).verdict is Verdict.INCONCLUSIVE


def test_sanitizers_that_are_absent_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizers.shutil, "which", lambda name: None)
    results, context = measured("launches", "sanitizers", sanitize=1)
    result = GATE.judge(results, context)
    assert result.verdict is Verdict.SKIPPED
    assert "sanitizers SKIPPED: compute-sanitizer is not on PATH" in result.summary
    assert [unit.id for unit in GATE.plan(context)][-1] == "sanitizers"


MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at one_shot_kernel+0x1c0 in collectives.py:74
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f0c5be00010 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at 0x1d0 in kda_step_kernel
=========     and Read access at 0x2b0 in kda_step_kernel [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_reports_of_compute_sanitizer_are_read() -> None:
    found = parse("memcheck", MEMCHECK)
    assert (found.total, len(found.reports)) == (1, 1)
    assert found.reports[0].kernel == "one_shot_kernel"
    assert found.reports[0].message == "memcheck: Invalid __global__ read of size 4 bytes"
    race = parse("racecheck", RACECHECK)
    assert (race.total, len(race.reports)) == (1, 1)
    assert "kda_step_kernel" in race.reports[0].message
    assert parse("memcheck", CLEAN) == sanitizers.Parsed((), 0)


def test_a_report_without_its_last_line_is_no_clean_report() -> None:
    assert parse("memcheck", "python3: error while loading shared libraries\n").total is None


def test_a_sanitizers_complaint_is_a_finding() -> None:
    report = {"kernel": "one_shot_kernel", "message": "memcheck: Invalid __global__ read of size 4 bytes"}
    tool = {"tool": "memcheck", "shape": "small-1", "said": "1 errors"}
    results = {"sanitizers": {"skipped": "", "tools": [tool], "reports": [report]}}
    result = GATE.judge(results, context_of(SETTINGS))
    assert (result.verdict, result.findings[0].component) == (Verdict.FAIL, "one_shot_kernel")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exhaustive_ranks": [5]}, "integers from 2 to 4"),
        ({"walks": 0}, "walks is 0"),
        ({"stress_steps": True}, "stress_steps is True"),
        ({"more": 1}, "unknown setting 'more'"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in (GATE.settings_error(SETTINGS | change) or "")
    assert GATE.settings_error(SETTINGS) is None


def test_every_profile_that_asks_for_it_requires_it_and_has_valid_settings() -> None:
    for name in profile_names():
        _, profile = load_profile(name)
        if "sync" in profile.gates:
            assert "sync" in profile.required, name
            assert GATE.settings_error(profile.gates["sync"]) is None, name


def test_only_this_gate_is_asked_for_faults_of_collectives_and_first_where_little_is_measured() -> None:
    context = context_of(SETTINGS)
    fault, other = FAULTS["sync-one-slot"], FAULTS["kda-beta-bf16"]
    assert can_see(GATE, fault)
    assert not can_see(GATE, other)
    assert not can_see(ParityGate(), fault)
    units = [unit.id for unit in units_for(GATE, context, fault)]
    assert units == ["launches", "collectives-2", "stalls-2", "sentinels"]


def test_a_target_without_collectives_is_not_judged() -> None:
    assert GATE.needs == {Capability.COLLECTIVES}
    assert replace(context_of(SETTINGS), settings={}).target.capabilities >= GATE.needs
