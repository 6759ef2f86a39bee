"""Faults of prefix reuse: which entry a request continues from, and with which state and rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("prefix reuse", kind=Kind.STALE)

PREFIXES = partial(LAYER.engine, "prefix_cache")


@PREFIXES(
    "prefix-one-block-short",
    "a hit of n blocks restores the state after n - 1",
    kind=Kind.INDEX,
    sources="M68",
    missed_by="cold runs; prompts of one block",
)
def _short(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def longest(self, tokens: Any) -> Any:
            entry = super().longest(tokens)
            before = entry and self._entries.get(entry.tokens[: -self._block])
            return replace(entry, state=before.state) if before else entry

    return Faulty


@PREFIXES(
    "prefix-partial-match",
    "pages reused up to the match, but with the state of the whole cached prompt",
    sources="M71",
    missed_by="exact repeats",
)
def _partial(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def longest(self, tokens: Any) -> Any:
            entry = super().longest(tokens)
            if entry is None:
                return None
            n = len(entry.tokens)
            longer = [e for e in self._entries.values() if len(e.tokens) > n and e.tokens[:n] == entry.tokens]
            return replace(entry, state=longer[-1].state) if longer else entry

    return Faulty


@PREFIXES(
    "prefix-key-by-length",
    "a prefix is found by its length: another request's answers",
    kind=Kind.OWNERSHIP,
    sources="M95",
    missed_by="one prompt in the test",
)
def _by_length(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def longest(self, tokens: Any) -> Any:
            entry = super().longest(tokens)
            boundary = (len(tokens) - 1) // self._block * self._block
            same = [e for e in self._entries.values() if len(e.tokens) == boundary]
            return entry or (same[0] if same else None)

    return Faulty


@PREFIXES(
    "prefix-last-page-lost",
    "the last page of a cached prefix is another one",
    kind=Kind.INDEX,
    sources="M77",
    missed_by="cold runs",
)
def _page(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def longest(self, tokens: Any) -> Any:
            entry = super().longest(tokens)
            return entry and replace(entry, pages=(*entry.pages[:-1], entry.pages[0]))

    return Faulty


@PREFIXES(
    "prefix-scale-on-hit",
    "rows of a cached prefix are read with another scale",
    kind=Kind.SCALE,
    sources="M119",
    missed_by="single turns",
)
def _scale(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def longest(self, tokens: Any) -> Any:
            entry = super().longest(tokens)
            for cache in self._latents.layers.values() if entry else ():
                rows = cache[list(entry.pages)]
                # One exponent step of E4M3 down, or half of a BF16.
                down = torch.where(rows & 0x78 != 0, rows - 8, rows) if rows.dtype == torch.uint8 else rows * 0.5
                cache[list(entry.pages)] = down
            return entry

    return Faulty


@PREFIXES(
    "prefix-boundary-late",
    "the state two tokens later is saved under the boundary's key",
    kind=Kind.INDEX,
    sources="M67",
    missed_by="prompts whose length is a multiple of the block",
)
def _late(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def is_boundary(self, length: int) -> bool:
            return bool(super().is_boundary(length) or (length > self._block and length % self._block == 2))

        def add(self, tokens: Any, pages: Any, state: Any) -> None:
            if len(tokens) % self._block == 0:
                super().add(tokens, pages, state)
                return
            key = tuple(tokens[: len(tokens) // self._block * self._block])
            if key in self._entries:
                self._entries[key] = replace(self._entries[key], state=state)

    return Faulty
