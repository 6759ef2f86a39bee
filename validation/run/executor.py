"""Executors: they turn planned units into outcomes. The runner works with any of them alike."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy
import torch

from validation.errors import describe
from validation.gates.base import Context, Gate, Unit
from validation.records.jsonio import digest, packed
from validation.records.record import ArmUse
from validation.run.accounting import WatchedTarget
from validation.targets.base import Target


@dataclass(frozen=True)
class Measured:
    """A unit that finished. `result` is plain JSON (`jsonio.packed`); `arms` tells what ran."""

    unit: Unit
    result: dict[str, Any]
    arms: dict[str, ArmUse]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A unit that raised: its error as one line, and the traceback for the log."""

    unit: Unit
    error: str
    traceback: str


Outcome = Measured | Failed


class Executor(Protocol):
    """Measures units, in any order and anywhere; a result depends on gate, unit and context only."""

    def measure(self, gate: Gate, units: Sequence[Unit], context: Context) -> Iterator[Outcome]:
        """Outcomes as they come. The caller may stop asking at any time."""
        ...


class InProcess:
    """Measures one unit after the other in this process."""

    def measure(self, gate: Gate, units: Sequence[Unit], context: Context) -> Iterator[Outcome]:
        """One outcome per unit, in order."""
        for unit in units:
            yield measure_unit(gate, unit, context)


def measure_unit(gate: Gate, unit: Unit, context: Context) -> Outcome:
    """Measure one unit. The random generators start from its own seed, so order and resumption change nothing."""
    _seed_generators(int(digest([context.seed, gate.name, unit.id])[:8], 16))
    watched = WatchedTarget(context)
    start = time.perf_counter()
    try:
        result = gate.measure(unit, replace(context, target=cast(Target, watched)))
        if not isinstance(result, dict):
            raise TypeError(f"measure returned {type(result).__name__}; a dict is needed")
        plain = packed(result)
    except Exception as error:
        return Failed(unit, describe(error), traceback.format_exc())
    return Measured(unit, plain, watched.use(), round(time.perf_counter() - start, 6))


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
