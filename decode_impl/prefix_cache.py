"""Prefix reuse at block boundaries: latent pages are shared, and a copy of the recurrent state is kept per boundary.

A hybrid model can only continue from a prefix whose *state* is known, so an entry is the state after exactly its
tokens; reusing more latent rows than the state covers, or fewer, would answer another question.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from decode_impl.caches import LatentCache, StateSnapshot


@dataclass(frozen=True)
class PrefixEntry:
    """A cached prefix: its tokens, its (full) pages, and the recurrent state right after its last token."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    state: StateSnapshot


class PrefixCache:
    """The least recently used prefixes, at most `capacity` of them. An entry owns a share of each of its pages."""

    def __init__(self, latents: LatentCache, block: int, capacity: int) -> None:
        self._latents, self._block, self._capacity = latents, block, capacity
        self._entries: OrderedDict[tuple[int, ...], PrefixEntry] = OrderedDict()
        self.hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pages(self) -> frozenset[int]:
        """Pages of which some cached prefix owns a share."""
        return frozenset(page for entry in self._entries.values() for page in entry.pages)

    def longest(self, tokens: Sequence[int]) -> PrefixEntry | None:
        """The longest cached prefix that leaves at least one token of `tokens` to run."""
        boundary = (len(tokens) - 1) // self._block * self._block
        while boundary > 0:
            entry = self._entries.get(tuple(tokens[:boundary]))
            if entry:
                self._entries.move_to_end(entry.tokens)
                self.hits += 1
                return entry
            boundary -= self._block
        return None

    def is_boundary(self, length: int) -> bool:
        """True where the state after `length` tokens may be cached."""
        return self._capacity > 0 and length > 0 and length % self._block == 0

    def add(self, tokens: Sequence[int], pages: Sequence[int], state: StateSnapshot) -> None:
        """Cache the prefix `tokens`, whose rows fill `pages` exactly, with the state right after it."""
        key = tuple(tokens)
        if key in self._entries:
            return
        for page in pages:
            self._latents.share(page)
        self._entries[key] = PrefixEntry(key, tuple(pages), state)
        while len(self._entries) > self._capacity:
            self.evict_oldest()

    def evict_oldest(self) -> bool:
        """Drop the least recently used prefix and its share of its pages; False if there is none."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        for page in entry.pages:
            self._latents.release(page)
        return True
