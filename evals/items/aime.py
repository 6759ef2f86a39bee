"""AIME25-like items: an integer answer from 0 to 999 after worked steps, boxed. Rows have `problem`, `answer`, `id`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from evals.items.base import Item, Message, Split, draw

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
Family = Callable[[random.Random], tuple[str, list[str], int]]


def times(x: int, digit: int) -> tuple[str, int]:
    """The long multiplication of `x` by one digit as one line, lowest digit first."""
    digits = [int(c) for c in reversed(str(x))]
    parts = [digit * d for d in digits]
    products = " ".join(f"{digit}*{d}={p}" for d, p in zip(digits, parts, strict=True))
    total = sum(p * 10**i for i, p in enumerate(parts))
    sums = "+".join(str(p * 10**i) for i, p in enumerate(parts))
    return f"{x}*{digit}: {products}" + (f" {sums}={total}" if len(parts) > 1 else ""), total


def _chain(r: random.Random) -> tuple[str, list[str], int]:
    x = r.randint(1, 999)
    name, told, steps = r.choice(NAMES), [], []
    opening = f"{name} writes down {x}"
    for _ in range(r.randint(2, 4)):
        kind = r.choice(("adds", "subtracts", "multiplies by"))
        amount = r.randint(2, 9) if kind == "multiplies by" else r.randint(2, 999)
        told.append(f"{kind} {amount}")
        if kind == "adds":
            steps.append(f"{x}+{amount}={x + amount}")
            x += amount
        elif kind == "subtracts":
            x += 1000 * (x < amount)
            steps.append(f"{x}-{amount}={x - amount}")
            x -= amount
        else:
            line, x = times(x, amount)
            steps.append(line)
        if x >= 1000:
            steps.append(f"{x} mod 1000={x % 1000}")
            x %= 1000
    text = f"{opening}, then {', then '.join(told)}. What is the remainder when the result is divided by 1000?"
    return text, steps, x


def _progression(r: random.Random) -> tuple[str, list[str], int]:
    first, gap, n = r.randint(1, 150), r.randint(2, 9), r.randint(11, 90)
    line, product = times(n - 1, gap)
    text = f"An arithmetic sequence starts {first}, {first + gap}, {first + 2 * gap}. Find its term number {n}."
    steps = [f"d={first + gap}-{first}={gap}", f"{n}-1={n - 1}", line, f"{first}+{product}={first + product}"]
    return text, steps, first + product


def _digit_sum(r: random.Random) -> tuple[str, list[str], int]:
    digits = [r.randint(1, 9) for _ in range(r.randint(5, 9))]
    total, steps = digits[0], []
    for d in digits[1:]:
        steps.append(f"{total}+{d}={total + d}")
        total += d
    return f"Find the sum of the digits of {''.join(map(str, digits))}.", [" ".join(steps)], total


def _power(r: random.Random) -> tuple[str, list[str], int]:
    base, exponent = r.randint(2, 9), r.randint(4, 8)
    x, steps = base, []
    for power in range(2, exponent + 1):
        line, x = times(x, base)
        x %= 100
        steps.append(f"{power}: {line} mod 100={x}")
    offset = r.randint(1, 99)
    steps.append(f"{x}+{offset}={x + offset}")
    text = f"Let r be the remainder when {base}^{exponent} is divided by 100. Find r+{offset}."
    return text, steps, x + offset


def _polynomial(r: random.Random) -> tuple[str, list[str], int]:
    a, b, c, x = r.randint(2, 9), r.randint(2, 9), r.randint(1, 99), r.randint(2, 9)
    line, top = times(x * x, a)
    steps = [f"{x}*{x}={x * x}", line, f"{b}*{x}={b * x}", f"{top}+{b * x}={top + b * x}"]
    total = top + b * x + c
    return f"Let f(x)={a}x^2+{b}x+{c}. Find f({x}).", [*steps, f"{top + b * x}+{c}={total}"], total


def _pairs(r: random.Random) -> tuple[str, list[str], int]:
    n = r.randint(11, 45)
    low, product_low = times(n, (n - 1) % 10)
    high, product_high = times(n, (n - 1) // 10)
    product = n * (n - 1)
    extra = r.randint(0, 999 - product // 2)
    steps = [f"{n}*{n - 1}", low, high, f"{product_low}+{product_high * 10}={product}"]
    steps += [f"{product}/2={product // 2}", f"{product // 2}+{extra}={product // 2 + extra}"]
    text = f"In how many ways can 2 of {n} people be chosen? Add {extra} to that number."
    return text, steps, product // 2 + extra


FAMILIES: tuple[Family, ...] = (_chain, _progression, _digit_sum, _power, _polynomial, _pairs)


def _make(r: random.Random) -> Item:
    problem, steps, answer = r.choice(FAMILIES)(r)
    target = "\n".join([*steps, f"\\boxed{{{answer}}}"])
    return Item({"problem": problem, "answer": str(answer)}, target)


def item(split: Split, index: int, seed: int = 0) -> Item:
    """Item `index` of a split; its row is `{"problem": str, "answer": str, "id": str}`."""
    made = draw(_make, lambda i: str(i.row["problem"]), split, ("aime", seed, index))
    return Item({**made.row, "id": str(index)}, made.target)


PROMPTS = (
    "{problem}\nPut the final answer in \\boxed{{}}.",
    "Question: {problem}\nAnswer:",
    "Work in steps and box the integer at the end.\n\n{problem}",
    "{problem}",
)
"""Ways to ask; the first is the usual one, the others keep the model from depending on its wording."""


def messages(row: dict[str, str], style: int = 0) -> list[Message]:
    """The chat that asks a row's problem."""
    return [{"role": "user", "content": PROMPTS[style].format(problem=row["problem"])}]


_LONGEST = 18
"""Digits of the longest number that is read: a looping answer boxes thousands of them."""


def extract(response: str) -> int | None:
    """The last boxed integer of a response; None where there is none, or one too long to be any answer."""
    found = re.findall(r"\\boxed\{\s*0*([0-9]+)\s*\}", response)
    return int(found[-1]) if found and len(found[-1]) <= _LONGEST else None


def correct(response: str, row: dict[str, str]) -> bool:
    """Whether the last boxed integer is the row's answer."""
    return extract(response) == int(row["answer"])
