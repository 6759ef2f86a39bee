"""What every generated item is, and how the train and eval splits stay apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "eval"]
Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """`row` has the real set's fields; `target` is a full right response with its worked steps, for training."""

    row: dict[str, Any]
    target: str


def rng(*key: object) -> random.Random:
    """A generator that depends on the values of `key` and on nothing else."""
    return random.Random("/".join(str(part) for part in key))


def split_of(question: str) -> Split:
    """The split that a question belongs to, by its text alone: one in sixteen is for evaluation.

    Two items with the same text are always in the same split, whatever seed made them.
    """
    return "eval" if hashlib.sha256(question.encode()).digest()[0] < 16 else "train"


def draw(
    make: Callable[[random.Random], Item], question: Callable[[Item], str], split: Split, key: tuple[object, ...]
) -> Item:
    """The first item of `split` that `make` gives for `key`."""
    if split not in ("train", "eval"):
        raise ValueError(f"item split {split!r} is unknown; allowed are train and eval")
    source = rng(split, *key)
    for _ in range(10_000):
        item = make(source)
        if split_of(question(item)) == split:
            return item
    raise ValueError(f"no {split} item among 10,000 drawn for {key}: too few different questions")
