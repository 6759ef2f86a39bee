"""A scenario made executable: every agent's operations as a list, over numbered words of memory and numbered values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from decode_impl.parallel.operations import (
    NOT_THERE,
    Add,
    Disagree,
    Drain,
    Load,
    Operation,
    Place,
    Poll,
    Return,
    Store,
    Wait,
)


class Kind(IntEnum):
    """What an operation does."""

    STORE = 0
    LOAD = 1
    WAIT = 2
    POLL = 3
    ADD = 4
    DRAIN = 5
    RETURN = 6
    DISAGREE = 7


_KINDS: Mapping[type, Kind] = {
    Store: Kind.STORE,
    Load: Kind.LOAD,
    Wait: Kind.WAIT,
    Poll: Kind.POLL,
    Add: Kind.ADD,
    Drain: Kind.DRAIN,
    Return: Kind.RETURN,
    Disagree: Kind.DISAGREE,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of one agent. `value` is what is stored, added or must be read; `call` the call it is part of."""

    kind: Kind
    operation: Operation
    call: int
    address: int = -1
    value: int = -1
    release: bool = False
    acquire: bool = True
    wrong: str = ""
    _known: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def ready(self, values: Sequence[object], number: int) -> bool:
        """Whether a wait or poll is over when it sees the value of this number; remembered."""
        known = self._known.get(number)
        if known is None:
            value = values[number]
            known = self.operation.ready(value) if isinstance(self.operation, Wait) else value is not NOT_THERE
            self._known[number] = known
        return known


@dataclass
class System:
    """Agents over one memory. `steps[a]` are agent a's operations; `start` is memory at the beginning."""

    steps: list[list[Step]]
    start: tuple[int, ...]
    values: list[object]
    places: list[Place]
    timeouts: bool = False
    dead: tuple[int, ...] = ()
    sum_of: Callable[[tuple[Any, ...]], object] = tuple
    _ids: dict[tuple[type, object], int] = field(default_factory=dict, repr=False)

    def number(self, value: object) -> int:
        """The number of a value, a new one if it has none yet."""
        return _number(self.values, self._ids, value)


class Builder:
    """Collects agents' operations and numbers their places and values."""

    def __init__(self, initial: Callable[[Place], object]) -> None:
        self._initial = initial
        self._places: dict[Place, int] = {}
        self._values: list[object] = []
        self._ids: dict[tuple[type, object], int] = {}
        self._start: list[int] = []
        self._agents: list[list[Step]] = []

    def agent(self, operations: Iterable[tuple[Operation, int, object, str]]) -> None:
        """Add an agent: its operations, each with its call, the value it must read, and what is wrong with it."""
        self._agents.append([self._step(*item) for item in operations])

    def build(self, **options: Any) -> System:
        """The system. Stores to words that nobody reads are left out: nothing can depend on them."""
        read = {
            step.address for steps in self._agents for step in steps if step.kind in (Kind.LOAD, Kind.WAIT, Kind.POLL)
        }
        kept = [
            [step for step in steps if step.kind is not Kind.STORE or step.address in read] for steps in self._agents
        ]
        return System(kept, tuple(self._start), self._values, list(self._places), _ids=self._ids, **options)

    def _step(self, operation: Operation, call: int, wanted: object, wrong: str) -> Step:
        kind = _KINDS[type(operation)]
        value, address, release, acquire = -1, -1, False, True
        if isinstance(operation, Store | Load | Wait | Poll | Add):
            address = self._address(operation.place)
        if isinstance(operation, Store | Add):
            value = self._number(operation.value)
        if isinstance(operation, Load | Poll):
            value = self._number(wanted)
        if isinstance(operation, Store):
            release = operation.release
        if isinstance(operation, Wait):
            acquire = operation.acquire
        return Step(kind, operation, call, address, value, release, acquire, wrong)

    def _address(self, place: Place) -> int:
        if place not in self._places:
            self._places[place] = len(self._places)
            self._start.append(self._number(self._initial(place)))
        return self._places[place]

    def _number(self, value: object) -> int:
        return _number(self._values, self._ids, value)


def _number(values: list[object], ids: dict[tuple[type, object], int], value: object) -> int:
    # Two ranks that decided alike compare equal and are still two messages.
    key = (type(value), (str(value), value))
    if key not in ids:
        ids[key] = len(values)
        values.append(value)
    return ids[key]
