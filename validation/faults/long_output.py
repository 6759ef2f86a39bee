"""Faults that long outputs show: NaN that spreads, degeneration, drift."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("long output", gate="stability")

_SOUND, _PERIOD = 8, 4
"""Tokens of an answer before it loops, and tokens of its loop."""

STATES = partial(LAYER.engine, "state_cache", gate="stability")
SAMPLE = partial(LAYER.engine, "sample", gate="stability")


@STATES(
    "long-nan-in-one-slot",
    "the third owner of a slot finds one NaN in it",
    kind=Kind.STALE,
    gate="parity",
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
    gate="parity",
    sources="M116",
    missed_by="crash counters; a check that logits are finite",
)
def _sanitised(right: Any) -> Any:
    return lambda logits, *rest: right(logits.nan_to_num(0.0, 0.0, 0.0), *rest)


@SAMPLE(
    "long-loops",
    "from its ninth token on an answer is its own last four tokens again and again, and drafts that loop are accepted",
    kind=Kind.SAMPLING,
    sources="M122, M123",
    missed_by="acceptance; next-token parity, whose texts are given",
)
def _loops(right: Any) -> Any:
    drawn: dict[tuple[Any, int], int] = {}

    def faulty(logits: Any, params: Any, position: int) -> int:
        loops = all((params, position - back) in drawn for back in range(1, _SOUND + 1))
        token = drawn[params, position - _PERIOD] if loops else int(right(logits, params, position))
        drawn[params, position] = token
        return token

    return faulty


LAYER.declare(
    "latent_cache",
    "long-kv-requantised",
    "cached rows are quantised again at every step",
    kind=Kind.STALE,
    sources="M123",
    missed_by="first turns without thinking",
    equivalent="the cache has one scale for all rows, loaded once: an E4M3 value quantised again with it is itself",
)
LAYER.declare(
    "drafter",
    "long-drafter-context",
    "the drafter loses its context beyond 8k tokens",
    kind=Kind.STALE,
    sources="M121, M122",
    missed_by="mean acceptance",
    not_applicable="the embedded model's context ends at 8,192 tokens; draft-context-missing is the same hole nearer",
)
