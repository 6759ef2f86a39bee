"""The question that a bisection inside a model asks: the parity gate's own, of one cell and a few sequences."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from validation.bisect.places import Place
from validation.errors import UsageError, one_line
from validation.gates.base import Context, GateResult, Unit
from validation.gates.parity.cells import cell_units
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.measure import windows
from validation.mutation.shared import SharedTarget
from validation.targets.base import Arm, ArmConfig, Target, TargetError

_CELL = re.compile(r"(bf16|fp8)-tp([1-9]\d?)(?:-dcp([1-9]\d?))?-b([1-9]\d?)")

DEFAULT_CELL = "fp8-tp1-b8"
"""One batch of eight with the cache format of the profiles."""


@dataclass(frozen=True)
class Cell:
    """A cell of the parity gate's matrix, and how much text is decoded in it. `name` is as the gate's findings say it.

    Raises:
        UsageError: a name or a length that the gate would not take.
    """

    name: str = DEFAULT_CELL
    sequences: int = 8
    prompt: int = 32
    decode: int = 12

    def __post_init__(self) -> None:
        if not _CELL.fullmatch(self.name):
            raise UsageError(
                f"no cell is called {self.name!r}; a cell is named as in the parity gate's findings, "
                f"format-ranks-batch, for example {DEFAULT_CELL}"
            )
        objection = ParityGate().settings_error(self.settings())
        if objection:
            raise UsageError(f"cell {self.name}: {one_line(objection)}")

    def unit(self) -> Unit:
        """The cell as a unit of the parity gate."""
        return Unit(self.name, cell_units(self.settings())[0].params)

    def settings(self) -> dict[str, object]:
        """The parity gate's settings with this cell alone."""
        found = _CELL.fullmatch(self.name)
        assert found
        cell = {"kv_cache_dtype": found[1], "tensor_parallel": [int(found[2])], "batches": [int(found[4])]}
        return {
            "prompt_length": self.prompt,
            "decode_length": self.decode,
            "min_sequences": self.sequences,
            "cells": [cell | ({"context_parallel": int(found[3])} if found[3] else {})],
        }


@dataclass
class ParityQuestion:
    """Is a candidate within its allowance of the noise floor? Baseline and floor are decoded once and remembered.

    Raises:
        UsageError: an arm that cannot be opened, or text that is too short for the cell.
    """

    target: Target
    baseline: ArmConfig
    candidate: ArmConfig
    cell: Cell
    seed: int
    _gate: ParityGate = field(default_factory=ParityGate, repr=False)

    def __post_init__(self) -> None:
        self._remembering = self.target
        try:
            baseline, candidate, floor = self.arms()
            self._remembering = cast(Target, _Remembering(self.target, {baseline, floor}))
            for arm in (baseline, candidate, floor):
                self.target.open(arm)
        except (TargetError, ValueError) as error:
            raise UsageError(f"cell {self.cell.name} cannot be measured: {one_line(error)}") from error

    def arms(self) -> Sequence[ArmConfig]:
        """Baseline, candidate and floor, as the parity gate opens them for this cell."""
        return self._gate.arms(self._context(self.candidate))

    def sequences(self, count: int) -> list[list[int]]:
        """`count` windows of held-out text of the cell's length, as the parity gate draws them."""
        seed = self.seed * 2**32 + zlib.crc32(self.cell.name.encode())
        return windows(self._remembering, count, self.cell.prompt + self.cell.decode, seed)

    def ask(self, substitutions: Sequence[Place] = ()) -> GateResult:
        """The gate's judgement on the candidate with the baseline's ops at these places."""
        context = self._context(replace(self.candidate, substitutions=tuple(substitutions)))
        unit = self.cell.unit()
        return self._gate.judge({unit.id: self._gate.measure(unit, context)}, context)

    def _context(self, candidate: ArmConfig) -> Context:
        return Context(self._remembering, self.baseline, candidate, self.seed, self.cell.settings())


class _Remembering(SharedTarget):
    """A target whose arms of these configurations decode once; what the candidate does is asked anew every time."""

    def __init__(self, target: Target, remembered: Collection[ArmConfig]) -> None:
        super().__init__(target)
        self._target, self._remembered = target, remembered
        self.tokens = cache(target.tokens)

    def open(self, config: ArmConfig) -> Arm:
        return super().open(config) if config in self._remembered else self._target.open(config)
