"""Faults of the caches an engine owns: slots of recurrent state, snapshots, pages of the latent cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("state and pages", kind=Kind.OWNERSHIP)

STATES = partial(LAYER.engine, "state_cache")
LATENTS = partial(LAYER.engine, "latent_cache")


@STATES(
    "state-not-reset",
    "a reused slot keeps its last owner's state",
    kind=Kind.STALE,
    sources="M61",
    missed_by="final tokens, GSM8K: 220 % error on the first tokens washes out",
)
def _not_reset(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def allocate(self) -> int:
            kept = [pool.clone() for pool in self.state.values()]
            slot = super().allocate()
            for pool, old in zip(self.state.values(), kept, strict=True):
                pool[slot] = old[slot]
            return int(slot)

    return Faulty


@STATES(
    "conv-not-reset",
    "a reused slot keeps its last owner's convolution window",
    kind=Kind.STALE,
    sources="M62",
    missed_by="a reset test of the state tensor alone; heals after three tokens",
)
def _conv_not_reset(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def allocate(self) -> int:
            kept = [pool.clone() for pool in self.conv.values()]
            slot = super().allocate()
            for pool, old in zip(self.conv.values(), kept, strict=True):
                pool[slot] = old[slot]
            return int(slot)

    return Faulty


@STATES(
    "state-last-layer-not-reset",
    "the reset of a reused slot skips the last layer",
    kind=Kind.INDEX,
    sources="M61",
    missed_by="a reset test of the first layer",
)
def _last_layer(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def allocate(self) -> int:
            last = list(self.state.values())[-1]
            kept = last.clone()
            slot = super().allocate()
            last[slot] = kept[slot]
            return int(slot)

    return Faulty


@STATES(
    "slot-given-twice",
    "a slot given back is handed out twice",
    sources="M63, M95",
    missed_by="one request at a time",
)
def _slot_twice(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def release(self, slot: int) -> None:
            super().release(slot)
            super().release(slot)

    return Faulty


@STATES(
    "null-slot-poisoned",
    "warm-up leaves NaN in the null slot",
    sources="M90",
    missed_by="eager runs; kernels that never read it",
)
def _null_slot(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for pool in (*self.conv.values(), *self.state.values()):
                pool[0] = torch.nan

    return Faulty


@STATES(
    "snapshot-not-written",
    "a prefix's checkpoint is committed but never written",
    kind=Kind.STALE,
    sources="M66",
    missed_by="cold runs",
)
def _not_written(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def snapshot(self, slot: int) -> Any:
            saved = super().snapshot(slot)
            return replace(saved, state=[torch.zeros_like(x) for x in saved.state])

    return Faulty


@STATES(
    "snapshot-not-copied",
    "a prefix's checkpoint is the live slot: it ends up as the state after the last token",
    kind=Kind.STALE,
    sources="M67",
    missed_by="prompts that end at the boundary",
)
def _not_copied(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def snapshot(self, slot: int) -> Any:
            live = [[pool[slot] for pool in pools.values()] for pools in (self.conv, self.state)]
            return replace(super().snapshot(slot), conv=live[0], state=live[1])

    return Faulty


@STATES(
    "snapshot-without-conv",
    "the convolution window is left out of a restore",
    kind=Kind.DROPPED,
    sources="M74",
    missed_by="a check of the recurrent tensor alone",
)
def _without_conv(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def restore(self, slot: int, snapshot: Any) -> None:
            super().restore(slot, replace(snapshot, conv=[torch.zeros_like(x) for x in snapshot.conv]))

    return Faulty


@STATES(
    "snapshot-layers-rotated",
    "a restore puts every layer's state into the next layer",
    kind=Kind.INDEX,
    sources="kind of M68",
    missed_by="cold runs",
)
def _rotated(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def restore(self, slot: int, snapshot: Any) -> None:
            super().restore(slot, replace(snapshot, state=[*snapshot.state[1:], snapshot.state[0]]))

    return Faulty


@STATES(
    "restore-lost-after-release",
    "a slot is published before its copy, which is dropped when an earlier owner was taken off it",
    kind=Kind.SCHEDULE,
    sources="M63",
    missed_by="steady state without aborts or preemption",
)
def _lost(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def release(self, slot: int) -> None:
            super().release(slot)
            self.dropped: int | None = slot

        def restore(self, slot: int, snapshot: Any) -> None:
            if getattr(self, "dropped", None) == slot:
                self.dropped = None
                return
            super().restore(slot, snapshot)

    return Faulty


@LATENTS(
    "pages-not-shared",
    "a prefix's pages are reused although a request still reads them",
    sources="M63",
    missed_by="pools that never run low",
)
def _not_shared(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def share(self, page: int) -> None:
            return

        def release(self, page: int) -> None:
            if self._owners[page] > 0:
                super().release(page)

    return Faulty


@LATENTS(
    "page-given-twice",
    "a page given back is handed out to two requests",
    sources="M95",
    missed_by="one request at a time",
)
def _page_twice(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def release(self, page: int) -> None:
            super().release(page)
            if self._owners[page] == 0:
                self._free.append(page)

    return Faulty


@LATENTS(
    "null-page-allocatable",
    "the null page is handed out to a request",
    sources="M84",
    missed_by="tests in which page 0 is never used",
)
def _null_page(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._free.append(0)

    return Faulty


@LATENTS(
    "null-page-poisoned",
    "warm-up leaves NaN in the null page",
    sources="M90, M117",
    missed_by="eager runs; kernels that never read it",
)
def _null_poisoned(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for cache in self.layers.values():
                cache[0] = 0x7F if cache.dtype == torch.uint8 else torch.nan

    return Faulty
