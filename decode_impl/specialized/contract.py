"""What the fused kernels and their emulation agree on: batch bins, split counts and reduction orders.

Every figure here is a function of the batch bin, the shape and the engine's limits, never of what else is in the batch:
that is what makes a row's bits a function of its bin alone.
"""

from __future__ import annotations

BATCH_BINS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that kernels are built for; a step is padded to the next bin with null rows."""

MAX_ROWS = BATCH_BINS[-1]
"""Rows of the largest specialised step."""

MIN_DRAFTS, MAX_DRAFTS = 3, 7
"""Drafts per request that a specialised verify step may have: one count for all requests of the step."""

ONE_SHOT_ROWS = 32
"""Largest bin whose all-reduce is one-shot (four thread groups); above it the two-shot order is used."""

_SPLIT_K = {1: 8, 2: 8, 4: 8, 8: 8, 16: 4, 32: 2, 64: 2}
_SPLIT_KV = {1: 64, 2: 64, 4: 64, 8: 32, 16: 16, 32: 8, 64: 4}
_LEAST_SPLIT_PAGES = 4
_K_GRAIN = 32

KV_BLOCK = 32
"""Keys that attention takes at a time within a split: a numerator is rounded relative to the largest score so far."""


def batch_bin(rows: int) -> int:
    """The smallest bin that holds `rows`.

    Raises:
        ValueError: more rows than the largest bin, or none.
    """
    for size in BATCH_BINS:
        if 0 < rows <= size:
            return size
    raise ValueError(f"{rows} rows given, 1 to {MAX_ROWS} are allowed in a specialised step")


def split_k(columns: int, rows: int) -> int:
    """Number of K slices of a projection over `columns`: slices are whole multiples of 32, or there is one slice."""
    for splits in range(_SPLIT_K[batch_bin(rows)], 1, -1):
        if columns and columns % (splits * _K_GRAIN) == 0:
            return splits
    return 1


def split_pages(max_pages: int, rows: int) -> int:
    """Pages that one KV split covers, from the engine's context limit (`max_pages` a request) and the batch bin.

    The splits of a bin give an H200 two CTAs a multiprocessor; below four pages a split costs more than it saves.
    """
    return max(-(-max_pages // _SPLIT_KV[batch_bin(rows)]), _LEAST_SPLIT_PAGES)
