"""A toy target that really computes, and toy gates that really judge it, for tests of the framework.

The model is a random matrix product. The generic path computes it in one piece; the specialised one in two, so
that it differs by rounding; a fault scales one column. Imported as a top-level module, in tests and in their children.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Fault, Ops
from validation.gates.base import Context, Finding, GateResult, Plot, Table, Unit
from validation.targets.base import ArmConfig, Capability, Case, Counters, TargetError
from validation.verdict import Verdict

WIDTH = 16


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def split_matmul(x: Tensor, weight: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T


def break_one_column(ops: Ops) -> Ops:
    right = ops["projection"]

    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = right(x, weight).clone()  # type: ignore[attr-defined]
        y[..., 3] *= 1.5
        return y

    return {**ops, "projection": wrong}


FAULTS = {
    "toy.column": Fault(
        id="toy.column",
        title="one output column is scaled by 1.5",
        component="projection",
        sources=("made up",),
        paths=("specialized",),
        mutate=break_one_column,
    )
}


class ToyArm:
    def __init__(self, config: ArmConfig) -> None:
        self.config = config
        self._special = config.decode_backend == "latency_specialized"
        ops: Ops = {"projection": split_matmul if self._special else matmul}
        for fault in config.faults:
            ops = fault.mutate(ops)
        self._ops = ops
        self._steps: dict[str, int] = {}
        self._fallbacks: dict[str, int] = {}

    def ops(self) -> frozenset[str]:
        return frozenset(self._ops)

    def run_op(self, op: str, case: Case, in_place: bool = False) -> dict[str, Tensor]:
        path = "specialized" if self._special else "generic"
        if self._special and case["x"].shape[0] > self.config.max_batch:
            self._fallbacks["too many rows"] = self._fallbacks.get("too many rows", 0) + 1
            path = "generic"
        self._steps[path] = self._steps.get(path, 0) + 1
        y = self._ops[op](case["x"], case["weight"])
        assert isinstance(y, Tensor)
        return {"y": y}

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> Any:
        raise AssertionError("toy gates decode nothing")

    def counters(self) -> Counters:
        return Counters(dict(self._steps), dict(self._fallbacks))


class ToyTarget:
    name = os.environ.get("TOY_NAME", "toy")
    capabilities = frozenset({Capability.RUN_OP, Capability.INJECT_FAULT})
    version = "1"

    @classmethod
    def load(cls, model_path: Path | None) -> ToyTarget:
        if model_path is not None and not (model_path / "toy").exists():
            raise TargetError(f"{model_path.name} holds no toy;\nsecond reason")
        return cls()

    def fingerprint(self) -> dict[str, str]:
        return {"model": "toy", "version": self.version}

    def tokens(self, text: str) -> list[int]:
        return list(text.encode())

    def dims(self) -> Mapping[str, int]:
        return {"hidden_size": WIDTH}

    def open(self, config: ArmConfig) -> ToyArm:
        if config.tensor_parallel > 8:
            raise TargetError("tensor_parallel is at most 8")
        return ToyArm(config)


class ErrorGate:
    """Is the candidate's error within twice the baseline's? Measured against float64."""

    name = "error"
    layer = 1
    question = "Is the candidate's rounding error at most twice the baseline's?"
    needs = frozenset({Capability.RUN_OP})
    cost = "a second"

    def settings_error(self, settings: Mapping[str, Any]) -> str | None:
        rows = settings.get("rows")
        if not isinstance(rows, list) or not rows:
            return f"rows must be a list of row counts, not {rows!r}"
        return None

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        return context.baseline, context.candidate

    def plan(self, context: Context) -> Sequence[Unit]:
        return [Unit(f"rows-{rows}", {"rows": rows}) for rows in context.settings["rows"]]

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        note_or_die(unit.id)
        # The global generator: what a unit draws must not depend on the units before it.
        x = torch.randn(unit.params["rows"], WIDTH)
        weight = torch.randn(WIDTH, WIDTH)
        exact = x.double() @ weight.double().T
        errors = {}
        for config in (context.baseline, context.candidate):
            y = context.target.open(config).run_op("projection", {"x": x, "weight": weight})["y"]
            errors[config.name] = float((y.double() - exact).pow(2).mean().sqrt())
        return errors

    def judge(self, results: Mapping[str, dict[str, Any]], context: Context) -> GateResult:
        ratios = {unit: result["candidate"] / result["baseline"] for unit, result in results.items()}
        findings = [
            Finding("projection", f"error is {ratio:.2f} times the baseline's; 2.00 is allowed", unit)
            for unit, ratio in ratios.items()
            if not ratio <= 2.0
        ]
        worst = max(ratios.values())
        plot = Plot("Error by rows", "bar", list(ratios), {"ratio": list(ratios.values())}, "unit", "ratio (1)")
        return GateResult(
            gate=self.name,
            verdict=Verdict.FAIL if findings else Verdict.PASS,
            summary=f"worst error ratio {worst:.3g} over {len(ratios)} units; 2 is allowed",
            findings=findings,
            metrics={"ratios": ratios, "worst": worst},
            tables=[Table("Errors", ("unit", "ratio"), list(ratios.items()), "n = 1 draw each")],
            plots=[plot] if context.settings.get("plot") else [],
        )


class CostlyGate(ErrorGate):
    """The same question a layer later, to see what a failing cheap layer does to a costly one."""

    name = "costly"
    layer = 2


class RanksGate(ErrorGate):
    """Needs something that the toy target cannot do."""

    name = "ranks"
    layer = 2
    needs = frozenset({Capability.RANKS})


class CrashGate(ErrorGate):
    """Raises in its second unit."""

    name = "crash"

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        if unit.params["rows"] != context.settings["rows"][0]:
            raise ZeroDivisionError("the first line\nand a second line")
        return super().measure(unit, context)


class IdleGate(ErrorGate):
    """Passes without ever opening the candidate."""

    name = "idle"

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        context.target.open(context.baseline)
        return {"candidate": 1.0, "baseline": 1.0}


GATES = {
    gate.name: f"decodegate_toy:{gate.__name__}" for gate in (ErrorGate, CostlyGate, RanksGate, CrashGate, IdleGate)
}

PROFILE = """
description = "a toy"
required = ["error", "costly"]

[target]
kind = "toy"

[baseline]
decode_backend = "auto"

[candidate]
decode_backend = "latency_specialized"

[gates.error]
rows = [1, 2, 4, 8, 16]

[gates.costly]
rows = [32, 64]
"""


PROFILE_WITH_PLOT = PROFILE.replace("[gates.error]", "[gates.error]\nplot = true")


def note_or_die(unit: str) -> None:
    """Note in the file TOY_LOG that the unit is being measured; die, be terminated or interrupted at the unit named."""
    log = os.environ.get("TOY_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{unit}\n")
    if os.environ.get("TOY_KILL_AT") == unit:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("TOY_TERMINATE_AT") == unit:
        os.kill(os.getpid(), signal.SIGTERM)
    if os.environ.get("TOY_INTERRUPT_AT") == unit:
        raise KeyboardInterrupt


def measured(log: Path) -> Iterator[str]:
    """Units that were measured, in order."""
    yield from log.read_text().split()
