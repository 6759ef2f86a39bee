"""Delta debugging: the smallest parts of a failing whole that fail by themselves.

`ddmin` (Zeller and Hildebrandt, 2002, section 3) returns a 1-minimal set: it fails, and without any one of its elements
it does not. It need not be the smallest failing set there is, nor the only one; `failing_sets` therefore takes what was
found out and looks on, until the rest no longer fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from validation.verdict import Verdict

Element = TypeVar("Element")


class BudgetSpent(Exception):
    """More runs were needed than allowed; `best` is the smallest failing set known by then."""


@dataclass
class Asked(Generic[Element]):
    """A test that remembers its answers. Sets are given and kept in the order of `elements`; `most` bounds the runs."""

    elements: Sequence[Element]
    test: Callable[[tuple[Element, ...]], Verdict]
    most: int
    answers: dict[frozenset[Element], Verdict] = field(default_factory=dict)

    def verdict(self, chosen: Sequence[Element]) -> Verdict:
        """What the test says of these elements.

        Raises:
            BudgetSpent: the answer is not known and no run is left.
        """
        key = frozenset(chosen)
        if key not in self.answers:
            if len(self.answers) >= self.most:
                raise BudgetSpent
            self.answers[key] = self.test(tuple(element for element in self.elements if element in key))
        return self.answers[key]

    def fails(self, chosen: Sequence[Element]) -> bool:
        """Whether these elements were shown to fail; one that is undecided was not."""
        return self.verdict(chosen) is Verdict.FAIL


def ddmin(failing: Sequence[Element], asked: Asked[Element]) -> list[Element]:
    """A 1-minimal failing part of `failing`, which fails while the empty set does not.

    With a single culprit and a test that fails exactly where it is present, at most 2 ceil(log2 n) runs.

    Raises:
        BudgetSpent: no run is left.
    """
    current, parts = list(failing), 2
    while len(current) > 1:
        chunks = _split(current, parts)
        smaller = next((chunk for chunk in chunks if asked.fails(chunk)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        rests = ([x for x in current if x not in set(chunk)] for chunk in chunks) if parts > 2 else ()
        rest = next((rest for rest in rests if asked.fails(rest)), None)
        if rest is not None:
            current, parts = rest, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(2 * parts, len(current))
        else:
            break
    return current


def failing_sets(asked: Asked[Element]) -> tuple[list[list[Element]], bool]:
    """Disjoint 1-minimal failing sets, in the order in which they were found, and whether the search is complete.

    After each set the search goes on in what is left without it, until that no longer fails. The search is incomplete
    where the budget ended it, or where what is left is neither shown to fail nor to pass.

    Raises:
        ValueError: the whole does not fail, or the empty set does: then there is nothing to look for here.
    """
    if not asked.fails(asked.elements) or asked.fails(()):
        raise ValueError("a search needs a whole that fails and an empty set that does not")
    found: list[list[Element]] = []
    rest = list(asked.elements)
    try:
        while asked.fails(rest):
            found.append(ddmin(rest, asked))
            rest = [element for element in rest if element not in set(found[-1])]
    except BudgetSpent:
        return found, False
    return found, asked.verdict(rest) is Verdict.PASS


def smallest_part(items: Sequence[Element], fails: Callable[[Sequence[Element]], bool], most: int) -> list[Element]:
    """Items of which none can be left out, of a list that fails as a whole; after `most` calls of `fails` the smallest
    failing list so far.
    """

    def test(chosen: tuple[int, ...]) -> Verdict:
        return Verdict.FAIL if fails([items[i] for i in chosen]) else Verdict.PASS

    every = range(len(items))
    asked = Asked(every, test, most, {frozenset(every): Verdict.FAIL})
    try:
        kept: Sequence[int] = [] if asked.fails(()) else ddmin(every, asked)
    except BudgetSpent:
        failing = [sorted(key) for key, verdict in asked.answers.items() if verdict is Verdict.FAIL]
        kept = min(failing, key=len)
    return [items[i] for i in kept]


def most_runs_of_single(n: int) -> int:
    """Runs that one culprit among `n` needs at most: the whole, the empty set, two a halving, and the rest."""
    return 2 * math.ceil(math.log2(n)) + 3 if n > 1 else 3


def _split(items: Sequence[Element], parts: int) -> list[list[Element]]:
    edges = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(edges) if a < b]
