"""How a generated text degenerates: loops, repetition, compressibility. Pure functions on token ids."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

LONGEST_PERIOD = 96
"""Tokens of the longest loop that is looked for."""

LEAST_REPEATS, LEAST_LOOP = 4, 32
"""A text loops where its end repeats one period at least four times and for at least 32 tokens."""


def loop_onset(tokens: Sequence[int]) -> int | None:
    """The index from which the text is one period again and again until its end, or None.

    The first pass of the period counts as the loop's; of several periods the one with the earliest onset is taken.
    """
    text = np.asarray(tokens)
    onsets = []
    for period in range(1, min(LONGEST_PERIOD, len(text) // LEAST_REPEATS) + 1):
        same = text[period:] == text[:-period]
        breaks = np.flatnonzero(~same)
        onset = int(breaks[-1]) + 1 if len(breaks) else 0
        looped = len(text) - onset
        if looped >= max(LEAST_LOOP, LEAST_REPEATS * period):
            onsets.append(onset)
    return min(onsets, default=None)


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of the text's n-grams that occurred in it before; 0 for a text shorter than n + 1."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def compression_ratio(text: bytes) -> float:
    """Size over compressed size (zlib, level 6); 1 for an empty text."""
    return len(text) / len(zlib.compress(text, 6)) if text else 1.0
