"""A numerics case that failed is measured first by the next runs in the same folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_k3 import SMALL_K3, small_target

from decode_impl.random_weights import random_checkpoint
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.numerics.gate import NumericsGate
from validation.profile import Profile, profile_from
from validation.records.record import RunRecord
from validation.records.storage import RunFolder
from validation.replay import earlier_failures, with_replays
from validation.run import environment
from validation.run.runner import Request, run
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget
from validation.targets.builtin_arm import BuiltinArm

PROFILE: dict[str, Any] = {
    "description": "one op, in a moment",
    "required": ["numerics"],
    "target": {"kind": "builtin"},
    "baseline": {"decode_backend": "auto"},
    "candidate": {"decode_backend": "latency_specialized"},
    "gates": {
        "numerics": {
            "ops": ["rms_norm"],
            "rows": [1, 2],
            "sequence_rows": [1],
            "shard_rows": [1],
            "shards": [],
            "seeds": 1,
        }
    },
}

WRONG = Fault("wrong", "made up", "rms_norm", (), ("specialized",), lambda ops: {"rms_norm": _doubled(ops["rms_norm"])})


def _doubled(op: Any) -> Any:
    return lambda **case: op(**case) * (2.0 if case["x"].shape[0] == 2 else 1.0)


class WrongTarget(BuiltinTarget):
    """A target whose specialised path is wrong at two rows, without anybody having asked for it."""

    def open(self, config: ArmConfig) -> BuiltinArm:
        return super().open(replace(config, faults=(WRONG, *config.faults)))


@pytest.fixture(autouse=True)
def _outside_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "git_state", lambda root: (None, None))


def profile() -> Profile:
    return profile_from(PROFILE, "test")


def finished(out: Path, target: BuiltinTarget, chosen: Profile, *faults: Fault) -> tuple[RunFolder, RunRecord]:
    """A run in `out`."""
    request = Request(
        profile_name="test",
        profile=chosen,
        gates=[NumericsGate()],
        selected=None,
        seed=3,
        faults=faults,
        keep_going=False,
        bisect=False,
        command=(),
    )
    return run(request, target, out)


def wrong_target() -> WrongTarget:
    return WrongTarget(random_checkpoint(SMALL_K3, seed=5), None)


def test_the_next_run_in_a_folder_measures_what_failed_there_first(tmp_path: Path) -> None:
    _, failed = finished(tmp_path, wrong_target(), profile())
    again = with_replays(profile(), tmp_path)
    cases = again.gates["numerics"]["replay"]
    assert cases
    assert all(case["rows"] == 2 and case["seed"] == 3000 for case in cases)
    _, second = finished(tmp_path, wrong_target(), again)
    units = second.stable.gates[0].units
    assert [unit.startswith("replay-") for unit in units] == [True] * len(cases) + [False] * 2
    assert second.stable.gates[0].findings[0].unit == units[0]
    assert failed.stable.gates[0].units == units[len(cases) :]
    assert second.stable.profile.content["gates"]["numerics"]["replay"] == cases  # type: ignore[index,call-overload]
    # A run of the mended code in a folder of its own has nothing to replay.
    finished(tmp_path / "mended", small_target(), again)
    assert "replay" not in with_replays(profile(), tmp_path / "mended").gates["numerics"]


def test_a_clean_folder_another_model_and_injected_faults_leave_the_profile_alone(tmp_path: Path) -> None:
    assert with_replays(profile(), tmp_path) == profile()
    assert with_replays(profile(), tmp_path / "missing") == profile()
    finished(tmp_path, small_target(), profile(), FAULTS["rms-norm-inverse-bf16"])
    assert with_replays(profile(), tmp_path) == profile()
    finished(tmp_path, wrong_target(), profile())
    assert with_replays(profile(), tmp_path) != profile()
    other = profile_from({**PROFILE, "model": {"path": "elsewhere"}}, "test")
    assert with_replays(other, tmp_path) == other


def test_records_that_cannot_be_read_and_cases_that_no_longer_exist_are_left_out(tmp_path: Path) -> None:
    folder, _ = finished(tmp_path, wrong_target(), profile())
    record = json.loads((folder.path / "record.json").read_text())
    (tmp_path / "99999999-000000-ffffff").mkdir()
    (tmp_path / "99999999-000000-ffffff" / "record.json").write_text("{")
    assert earlier_failures(tmp_path, "embedded")
    for case in record["stable"]["gates"][0]["metrics"]["failing_cases"]:
        case["family"] = "gone"
    (folder.path / "record.json").write_text(json.dumps(record))
    assert earlier_failures(tmp_path, "embedded") == []
