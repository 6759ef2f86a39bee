"""What a mutation run may not claim: that a broken fault was caught, that other options resume it, that it varies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import decodegate_toy as toy
import pytest
from small_k3 import context_of
from test_mutation import CATALOGUE, COLUMN, matrix_of, mutate
from toy_commandline import CommandLine

from validation.faults.base import Fault
from validation.faults.broken import BrokenFault
from validation.faults.layer import Layer
from validation.gates.base import Context, Unit
from validation.gates.parity.gate import ParityGate
from validation.mutation.matrix import Outcome, row_of, stable_bytes
from validation.mutation.measure import ERROR, asked
from validation.profile import load_profile
from validation.targets.base import TargetError

pytestmark = pytest.mark.usefixtures("catalogue")


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "FAULTS", CATALOGUE)


LAYER = Layer("test", gate="parity", sources="none")


@LAYER.op("rms_norm", "broken-op", "a name that does not exist")
def _op(op: Any, **case: Any) -> Any:
    return op(**case) + undefined  # type: ignore[name-defined]  # noqa: F821


@LAYER.part("mla_attend", "merge", "broken-part", "a call with arguments that do not fit")
def _part(merge: Any, partials: Any, lse: Any) -> Any:
    return merge(partials.sum(99), lse)


@LAYER.engine("state_cache", "broken-class", "a method with a mistake in it")
def _class(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def allocate(self) -> int:
            return int(super().allocate() + self.no_such_thing)

    return Faulty


@LAYER.made_of("rms_norm", "broken-change", "fails before anything runs")
def _change(ops: Any) -> Any:
    return ops["no such op"]


@LAYER.op("rms_norm", "refused", "the right code refuses what it is given")
def _refused(op: Any, *, weight: Any, **rest: Any) -> Any:
    return op(weight=weight[:-1], **rest)


BY_ID = {fault.id: fault for fault in LAYER.faults}


def schedule(fault: Fault) -> tuple[Context, list[Unit]]:
    settings = {**load_profile("premerge")[1].gates["parity"], "schedules": ["slot-reuse"], "cells": []}
    context = context_of(settings, faults=(fault,))
    return context, [unit for unit in ParityGate().plan(context) if "schedule" in unit.params]


@pytest.mark.parametrize("fault", ["broken-op", "broken-part", "broken-class", "broken-change"])
def test_a_fault_whose_own_code_fails_is_an_error_and_no_catch(fault: str) -> None:
    """A schedule calls an engine wrong that falls over; this one fell over the fault's own mistake."""
    context, units = schedule(BY_ID[fault])
    said = asked(ParityGate(), units, context)
    assert said["says"] == ERROR
    assert said["broken"]
    assert said["reason"].startswith("BrokenFault: the fault's own code fails: ")
    row = row_of(COLUMN, {"error": {"says": "caught", "reason": "r"}, "parity": said}, ["error", "parity"])
    assert row.outcome is Outcome.ERROR
    assert row.note == said["reason"]


def test_an_engine_that_falls_over_a_fault_in_the_right_code_is_caught() -> None:
    context, units = schedule(BY_ID["refused"])
    said = asked(ParityGate(), units, context)
    assert said["says"] == "caught"
    assert "broken" not in said


def test_the_error_passes_every_gate_that_takes_errors_for_findings() -> None:
    assert issubclass(BrokenFault, TargetError)


def test_two_runs_of_one_seed_leave_the_same_bytes_but_for_id_date_and_seconds(decodegate: CommandLine) -> None:
    documents = []
    for _ in range(2):
        assert mutate(decodegate) == 1
        documents.append(matrix_of(decodegate))
    assert documents[0]["run"] != documents[1]["run"]
    assert stable_bytes(documents[0]) == stable_bytes(documents[1])
    assert set(documents[0]["seconds"]) >= {"healthy", "toy.column", "toy.harmless"}
    assert b'"seconds"' not in stable_bytes(documents[0])
    mutate(decodegate, "--fault", "toy.column")
    assert stable_bytes(matrix_of(decodegate)) != stable_bytes(documents[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--fault", "toy.column"), "without --fault, not with --fault toy.column; leave it out"),
        (("--gate", "error"), "without --gate, not with --gate error; leave it out"),
        (("--seed", "3"), "with --seed 0, not with --seed 3; give that or leave it out"),
        (("--stop-at-first",), "without --stop-at-first, not with --stop-at-first; leave it out"),
    ],
)
def test_resuming_with_other_options_is_refused_in_one_line_and_changes_nothing(
    decodegate: CommandLine, options: tuple[str, ...], named: str
) -> None:
    mutate(decodegate)
    folder = decodegate.newest()
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path.name != "lock"}
    assert mutate(decodegate, "--resume", folder.run_id, *options) == 2
    assert len(decodegate.err.strip().splitlines()) == 1
    assert f"was started {named}" in decodegate.err
    assert {path: path.read_bytes() for path in before} == before
    assert mutate(decodegate, "--resume", folder.run_id) == 1


def test_a_folder_of_another_command_is_not_resumed(decodegate: CommandLine) -> None:
    mutate(decodegate)
    folder = decodegate.newest()
    for damaged in ("{", "[]", json.dumps({})):
        (folder.path / "request.json").write_text(damaged)
        assert mutate(decodegate, "--resume", folder.run_id) == 2
        assert len(decodegate.err.strip().splitlines()) == 1
    assert "does not say what it was started with" in decodegate.err
    (folder.path / "request.json").unlink()
    assert mutate(decodegate, "--resume", folder.run_id) == 2
    assert "is not a run of `decodegate mutate`" in decodegate.err


def test_a_broken_fault_ends_its_row_at_once() -> None:
    said = {"error": {"says": "error", "reason": "BrokenFault: x", "broken": True}}
    assert row_of(replace(COLUMN, id="b"), said, ["error"]).outcome is Outcome.ERROR
