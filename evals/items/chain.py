"""Long chains: hundreds to thousands of generated tokens, each of which has one known right value.

A table of ten numbers and a start are given; every step looks up the number under the last digit, adds it modulo
1000 and counts down. The last digits run through all ten in a cycle, so every entry stays in use and no early
fixed point makes the rest of a chain trivial. One line is about fifteen tokens: 270 steps fill 4,000.
"""

from __future__ import annotations

import random
import re
from typing import Any

from evals.items.base import Item, Message, Split, draw

TOKENS_PER_STEP = 15


def _lines(table: list[int], start: int, steps: int) -> tuple[list[str], int]:
    x, lines = start, []
    for left in range(steps, 0, -1):
        total = (x + table[x % 10]) % 1000
        lines.append(f"{left} {x:03d}+{table[x % 10]:03d}={total:03d}")
        x = total
    return lines, x


def item(split: Split, index: int, steps: int, seed: int = 0) -> Item:
    """Item `index` with `steps` steps; the row has problem, table, start, steps, answer, id."""

    def make(r: random.Random) -> Item:
        cycle = r.sample(range(10), 10)
        follows = {cycle[i - 1]: cycle[i] for i in range(10)}
        table = [10 * r.randint(0, 99) + (follows[digit] - digit) % 10 for digit in range(10)]
        start = r.randint(0, 999)
        listed = " ".join(f"{digit}:{number:03d}" for digit, number in enumerate(table))
        problem = f"Table {listed}. Start at {start:03d} and take {steps} steps."
        lines, answer = _lines(table, start, steps)
        row: dict[str, Any] = {"problem": problem, "table": table, "start": start, "steps": steps}
        return Item({**row, "answer": f"{answer:03d}"}, "\n".join([*lines, f"\\boxed{{{answer:03d}}}"]))

    made = draw(make, lambda i: str(i.row["problem"]), split, ("chain", seed, steps, index))
    return Item({**made.row, "id": str(index)}, made.target)


def messages(row: dict[str, Any]) -> list[Message]:
    """The chat that asks for a row's chain."""
    return [{"role": "user", "content": str(row["problem"])}]


def right_tokens(response: str, row: dict[str, Any]) -> int:
    """How many bytes of a response are right before the first wrong one."""
    expected = "\n".join(_lines(row["table"], row["start"], row["steps"])[0]).encode()
    got = response.encode()
    return next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
    )


def correct(response: str, row: dict[str, Any]) -> bool:
    """Whether the last boxed number is the chain's end."""
    found = re.findall(r"\\boxed\{(\d+)\}", response)
    return bool(found) and found[-1] == row["answer"]
