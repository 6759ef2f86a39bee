"""Delta debugging: the smallest part of a list that still fails (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_tries: int = 200) -> list[T]:
    """Items of which none can be left out: `fails` holds for them, and for no list with one of them less.

    Stops after `most_tries` calls of `fails` with the smallest list so far.
    """
    kept, parts, tries = list(items), 2, 0
    while len(kept) >= 1 and parts <= max(2, len(kept)):
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            rest = kept[:begin] + kept[begin + size :]
            tries += 1
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
            if tries >= most_tries:
                return kept
        else:
            if parts >= len(kept):
                break
            parts = min(len(kept), 2 * parts)
    return kept
