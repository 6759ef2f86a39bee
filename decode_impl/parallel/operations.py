"""What a rank program asks of memory. A program is a generator of these; who runs it says when each takes effect."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

Value = Any
"""Payload of one piece of a message: an array on real memory, a name in the explorer."""


@dataclass(frozen=True, slots=True)
class Place:
    """One word, or one piece of a message: an area of an agent's memory (a rank's, a stream's, a warp's), and where."""

    agent: int
    area: str
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.area}{list(self.index) if self.index else ''}@{self.agent}"


@dataclass(frozen=True, slots=True)
class Message:
    """What a load should find: the piece that `source` sends in `stage` of the call that is running."""

    stage: int
    source: int
    piece: int


@dataclass(frozen=True, slots=True)
class Store:
    """A store. A relaxed one may land late, and after later ones; one with `release` lands after all before it."""

    place: Place
    value: Value
    release: bool = False
    into_armed: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """A load of payload; the runner sends its value back."""

    place: Place
    message: Message


@dataclass(frozen=True, slots=True)
class Wait:
    """Spin until `ready(value)`; with `acquire`, no later load happens before. `source` is who should answer."""

    place: Place
    ready: Callable[[Value], bool]
    source: int
    epoch: int
    slot: int
    acquire: bool = True
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class Poll:
    """Spin on payload itself until it is not the sentinel; the runner sends its value back."""

    place: Place
    message: Message
    source: int
    epoch: int
    slot: int


@dataclass(frozen=True, slots=True)
class Add:
    """An atomic addition to a shared sum."""

    place: Place
    value: Value


@dataclass(frozen=True, slots=True)
class Drain:
    """All stores before this have landed: the end of a launch, or a full fence."""


@dataclass(frozen=True, slots=True)
class Return:
    """A call is over: its result, whose pieces must be the sums of this call."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Disagree:
    """This rank has seen that `source` decided otherwise, and gives up."""

    source: int
    epoch: int
    slot: int


class Sentinel:
    """The value of mail that has not arrived."""

    def __repr__(self) -> str:
        return "not there"


NOT_THERE = Sentinel()

Operation = Store | Load | Wait | Poll | Add | Drain | Return | Disagree
Program = Generator[Operation, Value, Any]
"""Yields operations, is sent the values of loads and polls, returns what the next call needs."""
