"""A case of the fuzzer: options of an engine and a list of operations, as data that a file can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from validation.errors import UsageError
from validation.fuzz.texts import TEXT_LENGTH, TEXTS
from validation.targets.schedule import NO_DRAFTS, Abort, Event, Preempt, Run, Schedule, Submit

MOST_OPERATIONS = 100
"""Operations of a case that a file may hold; those drawn have a fifth of it."""

PAGE = 16
"""Tokens of a page of the engines that play cases."""

LONGEST_PROMPT, MOST_TOKENS = 64, 14
MOST_DRAFTS, MOST_STEPS, MOST_BATCH = 7, 50, 8


@dataclass(frozen=True)
class Arrive:
    """A request arrives: the first `prompt` tokens of a text, to be continued by its next `tokens`.

    `accepted`: how many drafts are right, step by step in turn (`Submit.accepted`).
    """

    text: int
    prompt: int
    tokens: int
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Steps:
    """The engine runs so many steps."""

    count: int


@dataclass(frozen=True)
class Take:
    """A request, counted from 0 in the order of arrival and round again, is preempted or aborted, if it can be."""

    how: str
    request: int


Operation = Arrive | Steps | Take


@dataclass(frozen=True)
class Case:
    """Options as in `Schedule`, and the operations in order. After the last one all requests run to their end.

    `context_ranks`: ranks over which the candidate deals out every context (1: none).
    """

    operations: tuple[Operation, ...]
    max_batch: int = 3
    pages: int | None = None
    prefill_chunk: int = 64
    prefix_block: int = 16
    prefix_snapshots: int = 0
    drafts: int = 0
    poisoned: bool = False
    context_ranks: int = 1

    def arrivals(self) -> list[Arrive]:
        """The requests, in order: number i is called `r<i>`."""
        return [operation for operation in self.operations if isinstance(operation, Arrive)]

    def aborted(self) -> set[int]:
        """Numbers of the requests that an operation aborts, if they have not ended by then."""
        numbers, arrived = set[int](), 0
        for operation in self.operations:
            arrived += isinstance(operation, Arrive)
            if isinstance(operation, Take) and operation.how == "abort" and arrived:
                numbers.add(operation.request % arrived)
        return numbers

    def schedule(self, texts: Sequence[Sequence[int]]) -> Schedule:
        """What a target plays."""
        own = ("operations", "context_ranks")
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        # With contexts dealt out a page holds a row of every rank, and prefixes end at pages.
        page = PAGE * self.context_ranks
        options["prefix_block"] = -(-self.prefix_block // page) * page
        return Schedule((*self._events(texts), Run()), lenient=True, verify_caches=True, **options)

    def _events(self, texts: Sequence[Sequence[int]]) -> Iterator[Event]:
        arrived = 0
        for operation in self.operations:
            if isinstance(operation, Steps):
                yield Run(operation.count)
            elif isinstance(operation, Arrive):
                text, end = texts[operation.text], operation.prompt + operation.tokens
                prompt, continuation = tuple(text[: operation.prompt]), tuple(text[operation.prompt : end])
                yield Submit(f"r{arrived}", prompt, continuation, operation.accepted)
                arrived += 1
            elif arrived:
                request = f"r{operation.request % arrived}"
                yield Abort(request) if operation.how == "abort" else Preempt(request)


def as_json(case: Case) -> dict[str, Any]:
    """The case as plain JSON."""
    return {**asdict(case), "operations": [_operation_json(one) for one in case.operations]}


def _operation_json(one: Operation) -> dict[str, Any]:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(one).items()}
    return {"do": _NAMES[type(one)], **plain}


def from_json(content: object) -> Case:
    """The case in a file's content.

    Raises:
        UsageError: it is none; the first field that is wrong is named, with what is allowed.
    """
    if not isinstance(content, dict) or not isinstance(content.get("operations"), list):
        raise UsageError("the case has no list `operations`")
    listed = content["operations"]
    if not 0 < len(listed) <= MOST_OPERATIONS:
        raise UsageError(f"the case has {len(listed)} operations, 1 to {MOST_OPERATIONS} are allowed")
    options: dict[str, Any] = {name: _option(name, value) for name, value in content.items() if name != "operations"}
    return Case(tuple(_operation(one) for one in listed), **options)


def _operation(content: object) -> Operation:
    kinds = {name: kind for kind, name in _NAMES.items()}
    if not isinstance(content, dict) or content.get("do") not in kinds:
        raise UsageError(f"an operation has `do` = {', '.join(kinds)}; got {str(content)[:80]}")
    kind = kinds[content["do"]]
    given = {name: value for name, value in content.items() if name != "do"}
    unknown = given.keys() ^ {field.name for field in fields(kind)}
    if unknown:
        raise UsageError(f"operation {content['do']!r} has exactly {', '.join(f.name for f in fields(kind))}")
    if kind is Arrive:
        accepted = given["accepted"]
        if not isinstance(accepted, list) or len(accepted) > MOST_OPERATIONS:
            raise UsageError("`accepted` is a list of whole numbers")
        given["accepted"] = tuple(_whole("accepted", n, NO_DRAFTS, MOST_DRAFTS) for n in accepted)
    if kind is Take and given["how"] not in HOW:
        raise UsageError(f"`how` is {str(given['how'])[:40]!r}, allowed are {', '.join(HOW)}")
    for name in given.keys() & _RANGES.keys():
        given[name] = _whole(name, given[name], *_RANGES[name])
    made: Operation = kind(**given)
    return made


def _option(name: str, value: object) -> object:
    if name == "poisoned" and isinstance(value, bool):
        return value
    if name == "pages" and value is None:
        return value
    if name not in _OPTIONS:
        raise UsageError(f"the case has an option {name!r}; there are {', '.join(_OPTIONS)} and poisoned")
    number = _whole(name, value, *_OPTIONS[name])
    if name == "prefix_block" and number % PAGE:
        raise UsageError(f"prefix_block is {number}, a multiple of {PAGE} is needed")
    return number


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} is {str(value)[:40]}, a whole number from {least} to {most} is needed")
    return value


HOW = ("preempt", "abort")
_NAMES: dict[type, str] = {Arrive: "arrive", Steps: "run", Take: "take"}
_RANGES = {
    "text": (0, TEXTS - 1),
    "prompt": (1, LONGEST_PROMPT),
    "tokens": (1, MOST_TOKENS),
    "count": (0, MOST_STEPS),
    "request": (0, MOST_OPERATIONS),
}
LEAST_PAGES = -(-TEXT_LENGTH // PAGE)
"""The longest request alone needs so many pages."""
_OPTIONS = {
    "max_batch": (1, MOST_BATCH),
    "pages": (LEAST_PAGES, 1000),
    "prefill_chunk": (1, 256),
    "prefix_block": (16, 64),
    "prefix_snapshots": (0, 64),
    "drafts": (0, MOST_DRAFTS),
    "context_ranks": (1, 2),
}
