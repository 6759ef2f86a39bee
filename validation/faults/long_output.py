"""Faults that long outputs show: NaN that spreads, degeneration, drift."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("long output", gate="stability")

STATES = partial(LAYER.engine, "state_cache", gate="stability")
SAMPLE = partial(LAYER.engine, "sample", gate="stability")


@STATES(
    "long-nan-in-one-slot",
    "the third owner of a slot finds one NaN in it",
    kind=Kind.STALE,
    sources="M115",
    missed_by="HTTP status, kernel tests up to 8k tokens",
)
def _nan(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def allocate(self) -> int:
            slot = super().allocate()
            self.owners = {**getattr(self, "owners", {}), slot: getattr(self, "owners", {}).get(slot, 0) + 1}
            if self.owners[slot] == 3:
                next(iter(self.state.values()))[slot, ..., 0, 0] = torch.nan
            return int(slot)

    return Faulty


@SAMPLE(
    "long-nan-sanitised",
    "NaN in the logits replaced by 0 before sampling: rows become uniform draws",
    kind=Kind.MASK,
    sources="M116",
    missed_by="crash counters; a check that logits are finite",
)
def _sanitised(right: Any) -> Any:
    return lambda logits, *rest: right(logits.nan_to_num(0.0, 0.0, 0.0), *rest)


for _id, _title, _component, _sources, _missed in (
    ("long-kv-requantised", "cached rows are quantised again at every step", "latent_cache", "M123",
     "first turns without thinking"),
    ("long-drafter-context", "the drafter loses its context beyond 8k tokens", "drafter", "M121, M122",
     "mean acceptance"),
):  # fmt: skip
    LAYER.declare(_component, _id, _title, kind=Kind.STALE, sources=_sources, missed_by=_missed)
