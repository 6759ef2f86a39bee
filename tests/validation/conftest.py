"""Toy gates, target and faults in the place of the real ones, and a command line to use them with."""

from __future__ import annotations

from pathlib import Path

import decodegate_toy as toy
import pytest
from toy_commandline import CommandLine

from validation import loading
from validation.gates import registry as gates
from validation.run import environment
from validation.targets import registry as targets


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only toy gates, targets and faults are known."""
    for table, entries in ((gates.GATES, toy.GATES), (targets.TARGETS, {"toy": "decodegate_toy:ToyTarget"})):
        for key in list(table):
            monkeypatch.delitem(table, key)
        for key, value in entries.items():
            monkeypatch.setitem(table, key, value)
    monkeypatch.setattr(loading, "FAULTS", "decodegate_toy:FAULTS")
    # Someone may commit while the tests run, and a run is not resumed across commits.
    monkeypatch.setattr(environment, "git_state", lambda root: (None, None))


@pytest.fixture
def decodegate(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """The command line over toys."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return CommandLine(tmp_path, capsys)
