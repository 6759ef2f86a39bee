"""`decodegate replay FILE`: a failure again, by the kind that its file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode_impl.parallel.table import PROTOCOL
from validation.cli.app import main
from validation.profile import load_profile
from validation.records.replay_files import PLAYERS
from validation.sync.explore import Explorer
from validation.sync.faulty import with_fault
from validation.sync.replays import delays_document, trace_document
from validation.sync.scenario import Collective, Scenario
from validation.sync.stress_plan import StressPlan
from validation.sync.trace import trace_of

FAULT = "sync-no-exit-barrier"


def trace_file(folder: Path, *faults: str) -> Path:
    scenario = Scenario("in-place-2", 2, (Collective("in_place"),) * 2)
    parts = with_fault(PROTOCOL, FAULT)
    trace = trace_of(scenario.system(parts), Explorer(scenario.system(parts)).exhaust().actions)
    return written(folder, trace_document(scenario, trace, faults))


def written(folder: Path, content: Any) -> Path:
    path = folder / "replay.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_trace_fails_again_and_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace_file(tmp_path, FAULT))]) == 1
    out = capsys.readouterr().out
    assert "no overwrite before the last read" in out
    assert "sync-trace: fails again" in out


def test_a_trace_does_not_fail_where_the_fault_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace_file(tmp_path))]) == 0
    assert "sync-trace: does not fail" in capsys.readouterr().out


@pytest.mark.parametrize(("faults", "code"), [([], 0), (["kda-beta-bf16"], 1)])
def test_a_numerics_case_is_measured_again(faults: list[str], code: int, tmp_path: Path) -> None:
    profile = load_profile("smoke")[1].content()
    case = {"op": "kda_step", "width": "model", "family": "iid", "rows": 8, "seed": 1}
    content = {"kind": "numerics", "profile": profile, "seed": 0, "faults": faults, "case": case}
    assert main(["replay", str(written(tmp_path, content))]) == code


def test_a_delay_plan_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = StressPlan(2, 30, 1, kinds=("one_shot", "two_shot"), fault="sync-shared-epoch", limit_ms=1_000)
    assert main(["replay", str(written(tmp_path, delays_document(plan)))]) == 1
    assert "words are wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ({"kind": "opera"}, "is of no kind that can be replayed; kinds: numerics, schedule, sync-delays, sync-trace"),
        ([], "is of no kind"),
        ({"kind": "sync-trace"}, "not a trace to replay: a trace has the keys"),
        ({"kind": "sync-delays"}, "not a delay plan to replay: a delay plan has the key plan"),
        ({"kind": "numerics"}, "'target' is missing"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(written(tmp_path, content))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_fault_that_is_not_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace_file(tmp_path, "sync-made-up"))]) == 2
    assert "no fault that can be put in is called 'sync-made-up'" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_every_kind_has_a_player() -> None:
    assert set(PLAYERS) == {"numerics", "schedule", "sync-trace", "sync-delays"}
