"""A run killed at any moment can be finished, repeats only what is missing, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import decodegate_toy as toy
import pytest
from toy_commandline import CommandLine

from validation.records.record import stable_bytes
from validation.records.storage import RunFolder
from validation.run import environment
from validation.verdict import Verdict

UNITS = ["rows-1", "rows-2", "rows-4", "rows-8", "rows-16", "rows-32", "rows-64"]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the toy gates note every unit that they measure."""
    path = tmp_path / "measured.txt"
    path.touch()
    monkeypatch.setenv("TOY_LOG", str(path))
    return path


def child(decodegate: CommandLine, **variables: str) -> int:
    """Run the driver in a process of its own; its return code comes back."""
    driver = Path(__file__).parents[1] / "toy_driver.py"
    command = [sys.executable, str(driver), "run", "--profile", decodegate.profile, "--out", str(decodegate.runs)]
    command += ["--workers", "1"]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize(
    ("variables", "done_before"),
    [({"TOY_KILL_AT": "rows-64"}, 6), ({"TOY_KILL_AT_WRITE": "5"}, 3)],
    ids=["in a unit", "in a write"],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    decodegate: CommandLine, log: Path, variables: dict[str, str], done_before: int
) -> None:
    assert child(decodegate, **variables) == -signal.SIGKILL
    killed = decodegate.newest()
    assert killed.read_record().status == "running"
    assert killed.read_record().stable.verdict is None
    kept = sorted(path.stem for path in killed.path.glob("units/*/*.json"))
    assert len(kept) == len(set(kept)) == done_before
    log.write_text("")

    assert decodegate("run", "--workers", "1", "--resume", killed.run_id, "--out", str(decodegate.runs)) == 0
    assert sorted(toy.measured(log)) == sorted(set(UNITS) - set(kept))
    assert not list(killed.path.rglob("*.tmp"))
    resumed = killed.read_record()

    assert decodegate.run() == 0
    whole = decodegate.record()
    assert whole.run.id != resumed.run.id
    assert stable_bytes(whole) == stable_bytes(resumed)
    assert resumed.stable.verdict is Verdict.PASS


def test_two_runs_of_one_seed_agree_and_another_seed_does_not(decodegate: CommandLine) -> None:
    records = []
    for seed in ("3", "3", "4"):
        assert decodegate.run("--seed", seed) == 0
        records.append(decodegate.record())
    assert stable_bytes(records[0]) == stable_bytes(records[1])
    assert records[0].stable.gates[0].metrics != records[2].stable.gates[0].metrics


@pytest.mark.parametrize("stop", ["TOY_INTERRUPT_AT", "TOY_TERMINATE_AT"])
def test_an_interrupt_keeps_the_work_and_says_how_to_go_on(
    decodegate: CommandLine, log: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    monkeypatch.setenv(stop, "rows-8")
    assert decodegate.run() == 130
    run_id = decodegate.newest().run_id
    expected = f"decodegate: interrupted; go on with: decodegate run --resume {run_id} --out {decodegate.runs}\n"
    assert decodegate.err == expected
    monkeypatch.delenv(stop)
    log.write_text("")
    assert decodegate("run", "--workers", "1", "--resume", run_id, "--out", str(decodegate.runs)) == 0
    assert list(toy.measured(log)) == ["rows-8", "rows-16", "rows-32", "rows-64"]


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def edited(data: bytes) -> bytes:
    document = json.loads(data)
    document["content"]["result"]["candidate"] = 0.0
    return json.dumps(document).encode()


def of_another_unit(data: bytes) -> bytes:
    return data.replace(b"rows-2", b"rows-4")


@pytest.mark.parametrize("damage", [torn, edited, of_another_unit, lambda data: b"[]"])
def test_a_damaged_unit_file_is_measured_again(decodegate: CommandLine, log: Path, damage: object) -> None:
    assert decodegate.run() == 0
    folder = decodegate.newest()
    before = stable_bytes(folder.read_record())
    path = folder.path / "units" / "error" / "rows-2.json"
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    log.write_text("")
    assert decodegate("run", "--workers", "1", "--resume", folder.run_id, "--out", str(decodegate.runs)) == 0
    assert list(toy.measured(log)) == ["rows-2"]
    assert stable_bytes(folder.read_record()) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--seed", "1"), "seed: was 0, is 1"),
        (("--threads", "1"), "threads: was 2, is 1"),
        (("--fault", "toy.column"), "arms candidate faults: was [], is ['toy.column']"),
        (("--gate", "error"), "selected gates: was None, is ['error']"),
        (("--profile", "{profile}"), "profile gates error rows: was [1, 2, 4, 8, 16], is [1, 2]"),
    ],
)
def test_a_run_of_other_things_is_not_resumed(decodegate: CommandLine, arguments: tuple[str, str], reason: str) -> None:
    assert decodegate.run("--threads", "2") == 0
    folder = decodegate.newest()
    before = (folder.path / "record.json").read_bytes()
    decodegate.write_profile(toy.PROFILE.replace("[1, 2, 4, 8, 16]", "[1, 2]"))
    words = [word.format(profile=decodegate.profile) for word in arguments]
    assert decodegate("run", "--workers", "1", "--resume", folder.run_id, "--out", str(decodegate.runs), *words) == 2
    assert reason in decodegate.err
    assert (folder.path / "record.json").read_bytes() == before


def test_a_changed_model_is_not_resumed(decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decodegate.run() == 0
    monkeypatch.setattr(toy.ToyTarget, "version", "2")
    assert (
        decodegate("run", "--workers", "1", "--resume", decodegate.newest().run_id, "--out", str(decodegate.runs)) == 2
    )
    assert "target fingerprint version: was 1, is 2" in decodegate.err


def test_another_commit_is_not_resumed(decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decodegate.run() == 0
    monkeypatch.setattr(environment, "git_state", lambda root: ("abc", False))
    assert (
        decodegate("run", "--workers", "1", "--resume", decodegate.newest().run_id, "--out", str(decodegate.runs)) == 2
    )
    assert "git commit: was None, is abc" in decodegate.err


def test_a_run_in_use_is_not_resumed(decodegate: CommandLine) -> None:
    assert decodegate.run() == 0
    folder = decodegate.newest()
    with RunFolder(folder.path).lock():
        assert decodegate("run", "--workers", "1", "--resume", folder.run_id, "--out", str(decodegate.runs)) == 2
    assert f"is in use by process {os.getpid()}; wait for it or stop it" in decodegate.err
    assert decodegate("run", "--workers", "1", "--resume", folder.run_id, "--out", str(decodegate.runs)) == 0
