"""A mutation run says its folder first, and is resumed by its id alone, whatever stopped it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import decodegate_toy as toy
import pytest
from test_mutation import CATALOGUE, matrix_of
from toy_commandline import CommandLine

HERE = Path(__file__).parents[1]


@pytest.fixture
def stopped(decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A run with every option that decides what is measured, stopped in the middle."""
    monkeypatch.setattr(toy, "FAULTS", CATALOGUE)
    monkeypatch.setenv("TOY_INTERRUPT_AT", "rows-4")
    options = ("--gate", "error", "--fault", "toy.column", "--fault", "toy.equal", "--seed", "3", "--stop-at-first")
    code = decodegate("mutate", "--profile", decodegate.profile, "--out", str(decodegate.runs), *options, *ONE)
    assert code == 130
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    return decodegate


ONE = ("--workers", "1")


def resume(decodegate: CommandLine, *options: str) -> int:
    out = ("--out", str(decodegate.runs))
    return decodegate("mutate", "--resume", decodegate.newest().run_id, *out, *ONE, *options)


def test_the_first_line_is_the_folder_and_how_to_go_on(stopped: CommandLine) -> None:
    folder = stopped.newest()
    first = stopped.out.splitlines()[0]
    command = f"decodegate mutate --resume {folder.run_id} --out {stopped.runs}"
    assert first == f"run {folder.path}; where it stops, {command} goes on"
    assert stopped.err.strip() == f"decodegate: interrupted; go on with: {command}"


def test_a_run_is_resumed_by_its_id_alone(stopped: CommandLine) -> None:
    Path(stopped.profile).unlink()
    assert resume(stopped) == 0
    document = matrix_of(stopped)
    assert (document["seed"], document["first_only"], document["profile"]) == (3, True, "toy")
    assert sorted(row["fault"] for row in document["rows"]) == ["toy.column", "toy.equal"]
    assert list(document["scores"]) == ["error"]


def test_options_that_say_the_same_are_taken(stopped: CommandLine) -> None:
    same = ("--fault", "toy.equal", "--fault", "toy.column", "--seed", "3", "--stop-at-first", "--gate", "error")
    assert resume(stopped, *same, "--profile", stopped.profile, "--threads", "1") == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", "4"), "was started with --seed 3, not with --seed 4; give that or leave it out"),
        (("--seed", "0"), "was started with --seed 3, not with --seed 0; give that or leave it out"),
        (("--gate", "costly"), "was started with --gate error, not with --gate costly; give that or leave it out"),
        (
            ("--fault", "toy.liar"),
            "with --fault toy.column --fault toy.equal, not with --fault toy.liar; give that or leave it out",
        ),
        (("--profile", "smoke"), "toy.toml, not with --profile smoke; give that or leave it out"),
        (("--threads", "2"), "was started with --threads 1, not with --threads 2; give that or leave it out"),
        (("--model", "elsewhere"), "was started without --model, not with --model elsewhere; leave it out"),
    ],
)
def test_an_option_that_contradicts_is_refused_with_the_value_to_give(
    stopped: CommandLine, options: tuple[str, ...], said: str
) -> None:
    before = sorted(path.name for path in stopped.newest().path.rglob("*"))
    assert resume(stopped, *options) == 2
    assert said in stopped.err
    assert len(stopped.err.strip().splitlines()) == 1
    assert sorted(path.name for path in stopped.newest().path.rglob("*")) == before


@pytest.mark.parametrize("change", [{"--seed": "3"}, {"--gate": "error"}, {"more": 1}, {"--threads": 10**9}, None])
def test_a_request_that_says_something_else_is_refused_in_one_line(stopped: CommandLine, change: Any) -> None:
    path = stopped.newest().path / "request.json"
    document = json.loads(path.read_bytes())
    document["options"] = None if change is None else {**document["options"], **change}
    path.write_text(json.dumps(document))
    assert resume(stopped) == 2
    assert "does not say what it was started with; start a new one" in stopped.err
    assert len(stopped.err.strip().splitlines()) == 1


def test_a_profile_that_has_changed_is_refused_where_it_is_given_again(stopped: CommandLine) -> None:
    stopped.write_profile(toy.PROFILE.replace("[1, 2, 4, 8, 16]", "[1, 2]"))
    assert resume(stopped, "--profile", stopped.profile) == 2
    assert "was started with other settings of the gates; give no options besides --resume and --out" in stopped.err
    assert resume(stopped) == 0


def test_another_version_is_not_mixed_in(stopped: CommandLine) -> None:
    path = stopped.newest().path / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": "older"}))
    assert resume(stopped) == 2
    assert "was started with another version, and results of two are not mixed" in stopped.err


def toy_mutate(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "toy_driver.py"), "mutate", "--out", str(folder / "runs"), *ONE, *options]
    return subprocess.run(command, env={**os.environ, **paths, **environment}, capture_output=True, text=True)


def test_a_terminated_run_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    profile = tmp_path / "toy.toml"
    profile.write_text(toy.PROFILE)
    ended = toy_mutate(tmp_path, "--profile", str(profile), TOY_TERMINATE_AT="rows-64")
    assert ended.returncode == 130
    [folder] = (tmp_path / "runs").iterdir()
    assert f"interrupted; go on with: decodegate mutate --resume {folder.name} --out" in ended.stderr
    again = toy_mutate(tmp_path, "--resume", folder.name)
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "matrix.json").read_bytes())["passed"]


def test_what_sigterm_did_before_it_does_afterwards(stopped: CommandLine) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
