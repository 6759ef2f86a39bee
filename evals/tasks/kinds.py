"""What is asked and how it is graded, for each of the three kinds of eval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evals.items import gpqa
from evals.samples import Message
from evals.scorers import boxed, choice, needle
from evals.scorers.grade import Grade
from evals.tasks.schema import AnyItem, ChoiceItem, MathItem, NeedleItem


@dataclass(frozen=True)
class Kind:
    """Messages and grade of an item's repeat, and the group that a table puts the item in.

    `group_title` heads that table; `ordered` groups are lengths, and get an area under their curve. `chance` is the
    score of a guesser.
    """

    schema: type[AnyItem]
    ask: Callable[[Any, int], Sequence[Message]]
    grade: Callable[[Any, int, str], Grade]
    expected: Callable[[Any, int], str]
    group: Callable[[Any], str]
    group_title: str = ""
    ordered: bool = False
    chance: float = 0.0


def math_kind(prompt: str) -> Kind:
    """One boxed answer; `prompt` has a `{problem}`."""

    def ask(item: MathItem, repeat: int) -> list[Message]:
        return [Message(role="user", content=prompt.replace("{problem}", item.problem))]

    return Kind(
        schema=MathItem,
        ask=ask,
        grade=lambda item, repeat, text: boxed.grade(text, item.answer),
        expected=lambda item, repeat: str(item.answer),
        group=lambda item: "",
    )


def choice_kind(prompt: str) -> Kind:
    """Four choices in the order of (item, repeat); `prompt` has a `{question}` and `{choices}`."""

    def ask(item: ChoiceItem, repeat: int) -> list[Message]:
        answers, _ = gpqa.choices(item.row(), repeat)
        listed = "\n".join(f"({letter}) {answer}" for letter, answer in zip("ABCD", answers, strict=True))
        # Replaced from the left in one pass: a question may well hold braces.
        head, _, tail = prompt.partition("{question}")
        return [Message(role="user", content=head + item.question + tail.replace("{choices}", listed))]

    def expected(item: ChoiceItem, repeat: int) -> str:
        return gpqa.choices(item.row(), repeat)[1]

    return Kind(
        schema=ChoiceItem,
        ask=ask,
        grade=lambda item, repeat, text: choice.grade(text, expected(item, repeat)),
        expected=expected,
        group=lambda item: item.domain,
        group_title="domain",
        chance=1 / 4,
    )


def needle_kind(bins: Sequence[int]) -> Kind:
    """Copy one of several replies; groups are bins of `n_chars` with these upper limits, ascending."""
    return Kind(
        schema=NeedleItem,
        ask=lambda item, repeat: item.messages(),
        grade=lambda item, repeat, text: needle.grade(text, item.answer, item.random_string_to_prepend),
        expected=lambda item, repeat: str(item.answer),
        group=lambda item: length_bin(item.n_chars, bins),
        group_title="characters",
        ordered=True,
    )


def length_bin(n: int, bins: Sequence[int]) -> str:
    """`4096-8192`-like label of the bin that holds n, lower limit excluded; `> last` beyond all."""
    limits = [0, *bins]
    return next((f"{low + 1}-{high}" for low, high in pairwise(limits) if n <= high), f"> {limits[-1]}")


def area(means: Sequence[float]) -> float:
    """Area under scores over bins of doubling length, by trapezoids; a constant score is its own area."""
    if len(means) == 1:
        return means[0]
    return sum((a + b) / 2 for a, b in pairwise(means)) / (len(means) - 1)
