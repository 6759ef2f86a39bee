"""Faults of the drafter. Target text stays exact under all of them: only acceptance shows them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer
from validation.faults.memory import wrapped

LAYER = Layer("drafter")

DRAFTER = partial(LAYER.engine, "drafter", gate="stability", kind=Kind.INDEX)

NO_DRAFT = -1


@DRAFTER(
    "draft-rows-shifted",
    "draft rows shifted by one",
    sources="M82",
    missed_by="target text",
)
def _shifted(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def draft(self, *inputs: Any) -> Any:
            return super().draft(*inputs).roll(1, 1)

    return Faulty


@DRAFTER(
    "draft-rows-permuted",
    "draft rows do not follow a reordered batch",
    sources="M129",
    missed_by="one request; a fixed order of requests",
)
def _permuted(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def draft(self, *inputs: Any) -> Any:
            return super().draft(*inputs).roll(1, 0)

    return Faulty


@DRAFTER(
    "draft-context-missing",
    "tokens of the first block never reach the drafter's cache",
    kind=Kind.STALE,
    sources="M77, M121",
    missed_by="target text; cold, short benchmarks",
)
def _missing(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def observe(self, taps: Any, positions: Any, indices: Any) -> None:
            super().observe(taps, torch.where(indices < 64, 0, positions), indices)

    return Faulty


@DRAFTER(
    "draft-row-offset-int16",
    "offset of a drafter's row computed in 16 bits: as 32 bits in a pool 65,536 times as large",
    kind=Kind.OVERFLOW,
    sources="M11",
    missed_by="small pools; the target's own writer; target text",
)
def _offset(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def observe(self, taps: Any, positions: Any, indices: Any) -> None:
            super().observe(taps, wrapped(positions, self.cache.shape[-1], bits=16), indices)

    return Faulty


@DRAFTER(
    "draft-wrong-tap",
    "drafter reads the tap of another layer",
    kind=Kind.OPERAND,
    sources="M55",
    missed_by="target logits",
)
def _tap(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def observe(self, taps: Any, positions: Any, indices: Any) -> None:
            super().observe([taps[0]] * len(taps), positions, indices)

    return Faulty


@DRAFTER(
    "draft-position-off",
    "rotary positions of the drafts one too large",
    kind=Kind.CONSTANT,
    sources="M82",
    missed_by="target text",
)
def _position(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def observe(self, taps: Any, positions: Any, indices: Any) -> None:
            super().observe(taps, positions, indices + 1)

    return Faulty


@DRAFTER(
    "draft-id-out-of-range",
    "arg-max over a NaN row returns an id that does not exist",
    kind=Kind.MASK,
    gate="parity",
    sources="M30, M130",
    missed_by="ordinary probabilities",
)
def _out_of_range(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def draft(self, *inputs: Any) -> Any:
            drafts = super().draft(*inputs)
            return torch.where(drafts == NO_DRAFT, 1 << 30, drafts)

    return Faulty


LAYER.declare(
    "drafter's schedule",
    "draft-target-heads",
    "drafter's attention schedule made with the target's head count",
    kind=Kind.OPERAND,
    gate="stability",
    sources="M30",
    missed_by="target-only tests",
    not_applicable="the drafter has no attention schedule of its own",
)
