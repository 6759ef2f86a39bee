"""A unit's result depends on gate, unit and context only, and what it used is counted once and for the right arm."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import decodegate_toy as toy
import numpy
import pytest
import torch
from toy_commandline import CommandLine

from validation.gates.base import Context, Gate, GateResult, Unit
from validation.profile import load_profile
from validation.records.record import ArmUse, stable_bytes
from validation.run.accounting import WatchedTarget, role
from validation.run.executor import Failed, InProcess, Measured, Outcome, measure_unit
from validation.run.runner import Request, run
from validation.targets.base import ArmConfig
from validation.verdict import Verdict

CONTEXT = Context(
    toy.ToyTarget(),
    ArmConfig("baseline"),
    ArmConfig("candidate", decode_backend="latency_specialized"),
    seed=5,
    settings={"rows": [1, 2]},
)
CASE = {"x": torch.ones(1, toy.WIDTH), "weight": torch.ones(4, toy.WIDTH)}


class Draws(toy.ErrorGate):
    """Draws from every global generator."""

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        return {"draws": [random.random(), float(numpy.random.rand()), float(torch.rand(()))]}


def test_a_unit_draws_the_same_numbers_wherever_and_whenever_it_runs() -> None:
    first = [measure_unit(Draws(), Unit(name), CONTEXT) for name in ("a", "b", "a")]
    results = [outcome.result for outcome in first if isinstance(outcome, Measured)]
    assert results[0] == results[2] != results[1]
    other = measure_unit(Draws(), Unit("a"), dataclasses.replace(CONTEXT, seed=6))
    assert isinstance(other, Measured)
    assert other.result != results[0]


class Broken(toy.ErrorGate):
    """Returns what it is made with, or raises it."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "TypeError: measure returned NoneType; a dict is needed"),
        ({"y": torch.ones(1)}, "TypeError: y is of type Tensor; plain JSON is needed"),
        (KeyError("k\nl"), r"KeyError: 'k\nl'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_unit_that_breaks_is_an_outcome_with_one_line(result: Any, error: str) -> None:
    outcome = measure_unit(Broken(result), Unit("u"), CONTEXT)
    assert isinstance(outcome, Failed)
    assert outcome.error == error
    assert outcome.traceback.startswith("Traceback")


def test_an_interrupt_is_not_an_outcome() -> None:
    class Interrupted(toy.ErrorGate):
        def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(InProcess().measure(Interrupted(), [Unit("u")], CONTEXT))


def test_steps_are_counted_from_the_opening_on_and_an_arm_opened_twice_once() -> None:
    arm = toy.ToyArm(CONTEXT.candidate)
    arm.run_op("projection", CASE)

    class SameArm(toy.ToyTarget):
        def open(self, config: ArmConfig) -> toy.ToyArm:
            return arm

    watched = WatchedTarget(dataclasses.replace(CONTEXT, target=SameArm()))
    for _ in range(2):
        watched.open(CONTEXT.candidate).run_op("projection", CASE)
    assert watched.use() == {"candidate": ArmUse(steps={"specialized": 2})}
    assert watched.dims() == {"hidden_size": toy.WIDTH}


def test_a_variant_counts_for_the_arm_that_it_is_a_variant_of() -> None:
    def of(config: ArmConfig, **changes: Any) -> str:
        return role(dataclasses.replace(config, **changes), CONTEXT)

    assert of(CONTEXT.candidate, kv_cache_dtype="fp8") == "candidate"
    assert of(CONTEXT.candidate, name="candidate fp8") == "candidate"
    assert of(CONTEXT.baseline, name="noise floor") == "noise floor"
    alike = dataclasses.replace(CONTEXT, candidate=ArmConfig("candidate"))
    assert role(ArmConfig("noise floor"), alike) == "noise floor"


class Backwards:
    """Measures the units in the opposite order."""

    def measure(self, gate: Gate, units: Sequence[Unit], context: Context) -> Iterator[Outcome]:
        return InProcess().measure(gate, list(reversed(units)), context)


class Forgetful:
    """Loses the last unit."""

    def measure(self, gate: Gate, units: Sequence[Unit], context: Context) -> Iterator[Outcome]:
        return InProcess().measure(gate, units[:-1], context)


def request(decodegate: CommandLine) -> Request:
    name, profile = load_profile(decodegate.profile)
    return Request(profile_name=name, profile=profile, gates=[toy.CostlyGate(), toy.ErrorGate()])


def test_the_record_does_not_depend_on_the_executor(decodegate: CommandLine, tmp_path: Path) -> None:
    _, forwards = run(request(decodegate), toy.ToyTarget(), tmp_path / "a")
    _, backwards = run(request(decodegate), toy.ToyTarget(), tmp_path / "b", executor=Backwards())
    assert stable_bytes(forwards) == stable_bytes(backwards)
    assert [gate.name for gate in forwards.stable.gates] == ["error", "costly"]


def test_a_lost_unit_is_an_error(decodegate: CommandLine, tmp_path: Path) -> None:
    _, record = run(request(decodegate), toy.ToyTarget(), tmp_path, executor=Forgetful())
    assert record.stable.verdict is Verdict.ERROR
    assert "the executor lost 1 units, the first is rows-16" in record.stable.gates[0].summary


class BadJudge(toy.ErrorGate):
    """Judges wrongly, in a way that the test chooses."""

    result: Any = None

    def judge(self, results: Any, context: Context) -> GateResult:
        return self.result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "judge: "),
        (GateResult("error", Verdict.PASS, "s", metrics={"t": torch.ones(1)}), "metrics.t is of type Tensor"),
        (GateResult("another", Verdict.PASS, "s"), "result of gate 'another'"),
    ],
)
def test_a_judgement_that_cannot_be_recorded_is_an_error(
    decodegate: CommandLine, tmp_path: Path, result: Any, words: str
) -> None:
    gate = BadJudge()
    gate.result = result
    one = dataclasses.replace(request(decodegate), gates=[gate])
    _, record = run(one, toy.ToyTarget(), tmp_path)
    assert record.stable.gates[0].verdict is Verdict.ERROR
    assert words in record.stable.gates[0].summary
