"""Canaries: prompts whose answers must stay the same bit for bit, however much else has been answered in between.

Canaries are asked in a batch of their own, so every step has the same shapes as the first time: whatever differs was
left behind by the load, in a slot, a page, a buffer or a counter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from resource import RUSAGE_SELF, getrusage

import numpy as np

from validation.gates.parity.measure import windows
from validation.targets.base import Arm, Capability, Target
from validation.targets.text import Answer, Ask

CANARIES = 4
"""Prompts that are asked again. Two are greedy; two are sampled, so that random numbers are canaries too."""

PROMPT, TOKENS = 48, 24
MOST_LOAD, LONGEST_LOAD = 8, 96
"""Requests of one load at most, and their longest prompt; answers have up to half of it."""

MAX_CONTEXT = LONGEST_LOAD + LONGEST_LOAD // 2


@dataclass
class Soaked:
    """What a soak saw: rounds of load, canaries compared, and every canary that changed, in a sentence.

    `statement` says what of an answer was compared.
    """

    rounds: int = 0
    compared: int = 0
    answered: int = 0
    errors: int = 0
    changed: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    statement: str = "compared: tokens, how they ended, bits of entropies and of state norms"

    @property
    def failed(self) -> bool:
        """Whether a canary changed or an answer ended in an error."""
        return bool(self.changed or self.errors)

    def summary(self) -> str:
        """One line with its numbers; no change in n comparisons bounds the rate of changes by 3/n at 95 %."""
        bound = (
            f"; at most {3 / self.compared:.2g} of canaries change (95 %)" if self.compared and not self.changed else ""
        )
        grown = (self.memory[-1] - self.memory[0]) / 2**20 if self.memory else 0.0
        memory = f"; peak memory grew by {grown:.0f} MiB" if self.memory else ""
        return (
            f"{self.rounds} rounds, {self.answered} answers between: {len(self.changed)} of {self.compared} canaries "
            f"changed, {self.errors} answers ended in an error{bound}{memory}; {self.statement}"
        )


def soak(target: Target, arm: Arm, seed: int, go_on: Callable[[], bool], most_changes: int = 10) -> Soaked:
    """Load and canaries in turn, until `go_on` says no or `most_changes` canaries have changed.

    Raises:
        ValueError: the target cannot answer prompts.
    """
    if Capability.GENERATE not in target.capabilities:
        raise ValueError(f"target {target.name!r} cannot answer prompts; there is nothing to soak")
    asks = _canaries(target, seed)
    seen, first = Soaked(), arm.answer(asks)
    for load in _loads(target, seed):
        if not go_on() or len(seen.changed) >= most_changes:
            return seen
        answers = arm.answer(load)
        again = arm.answer(asks)
        seen.rounds, seen.answered, seen.compared = (
            seen.rounds + 1,
            seen.answered + len(load),
            seen.compared + len(asks),
        )
        seen.errors += sum(one.finish == "error" for one in (*answers, *again))
        seen.changed += [
            f"canary {i} in round {seen.rounds}: {message}"
            for i, pair in enumerate(zip(first, again, strict=True))
            if (message := difference(*pair))
        ]
        seen.memory.append(getrusage(RUSAGE_SELF).ru_maxrss * 1024)
    return seen


def difference(first: Answer, again: Answer) -> str:
    """How two answers differ, or nothing."""
    for place, (a, b) in enumerate(zip(first.tokens, again.tokens, strict=False)):
        if a != b:
            return f"token {place} is {b}, it was {a}"
    if len(first.tokens) != len(again.tokens) or first.finish != again.finish:
        return f"{len(again.tokens)} tokens ({again.finish}), there were {len(first.tokens)} ({first.finish})"
    if _bits(first.entropies) != _bits(again.entropies):
        return "the same tokens from logits of other bits (entropies differ)"
    if first.state_norms != again.state_norms:
        return "the same tokens from a recurrent state of another norm"
    return ""


def _bits(values: Sequence[float]) -> list[bytes]:
    return [struct.pack("<d", math.nan if math.isnan(value) else value) for value in values]


def _canaries(target: Target, seed: int) -> list[Ask]:
    prompts = windows(target, CANARIES, PROMPT, seed)
    return [
        Ask(tuple(prompt), TOKENS, seed * CANARIES + i, temperature=0.0 if i % 2 == 0 else 0.8)
        for i, prompt in enumerate(prompts)
    ]


def _loads(target: Target, seed: int) -> Iterator[list[Ask]]:
    """Load without end: other prompts, lengths and batch sizes every time."""
    places = np.random.default_rng(seed)
    [text] = windows(target, 1, 4 * LONGEST_LOAD, seed + 1)
    number = CANARIES * (seed + 1)
    while True:
        load = []
        for _ in range(int(places.integers(1, MOST_LOAD + 1))):
            length, start = int(places.integers(1, LONGEST_LOAD + 1)), int(places.integers(0, 3 * LONGEST_LOAD))
            tokens, number = int(places.integers(1, LONGEST_LOAD // 2)), number + 1
            load.append(
                Ask(tuple(text[start : start + length]), tokens, number, temperature=float(places.choice([0, 1])))
            )
        yield load
