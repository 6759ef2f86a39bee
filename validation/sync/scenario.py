"""Scenarios: which calls the ranks make, with which programs; and how they become systems to explore."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_impl.parallel.operations import (
    NOT_THERE,
    Disagree,
    Load,
    Operation,
    Place,
    Poll,
    Return,
    Store,
)
from decode_impl.parallel.programs import Call, Parts
from decode_impl.parallel.protocol import GATHER
from validation.sync.payload import POISON, Decided, Part, Sum, added, expected
from validation.sync.system import Builder, System

WORD_BITS = 3
"""Width of flags and epochs in the explorer: the least that the protocols' argument needs, so that they wrap soon."""

Item = tuple[Operation, int, object, str]
"""An operation, its call, the value that it must read, and what is wrong with it."""


@dataclass(frozen=True)
class Collective:
    """One call of all ranks: the program of each (one name for all, or one per rank), tiles, and pieces of payload."""

    program: str | tuple[str, ...]
    tiles: int = 1
    pieces: int = 1
    decisions: tuple[int, ...] | None = None

    def of(self, rank: int) -> str:
        """The program that a rank runs."""
        return self.program if isinstance(self.program, str) else self.program[rank]


@dataclass(frozen=True)
class Scenario:
    """Calls of all ranks in order. `stop` is (rank, operation) at which a rank dies; `epoch` the one they start after.

    With `timeouts`, any rank may lose patience at any wait.
    """

    name: str
    ranks: int
    calls: tuple[Collective, ...]
    epoch: int = 0
    stop: tuple[int, int] | None = None
    timeouts: bool = False

    def system(self, parts: Parts) -> System:
        """The scenario with these parts, as agents over one memory."""
        p = narrow(parts)
        builder = Builder(partial(self._initial, p))
        for rank in range(self.ranks):
            operations = list(_rank_operations(p, self, rank))
            builder.agent(operations[: self.stop[1]] if self.stop and self.stop[0] == rank else operations)
        return builder.build(
            timeouts=self.timeouts,
            dead=(self.stop[0],) if self.stop else (),
            sum_of=partial(_sum_in_landing_order, self.ranks),
        )

    def length(self, parts: Parts, rank: int) -> int:
        """Number of operations of a rank that is not stopped."""
        return len(list(_rank_operations(narrow(parts), self, rank)))

    def _initial(self, p: Parts, place: Place) -> object:
        if place.area == "flag":
            return p["flag_value"](self.epoch, GATHER)
        if place.area in ("event", "layers"):
            return 0
        flagless = any(call.of(0) == "mail_without_flags" for call in self.calls)
        return NOT_THERE if place.area == "mail" and flagless else "empty"


def narrow(parts: Parts) -> dict[str, Any]:
    """The parts with words of few bits."""
    narrowed = {name: partial(parts[name], bits=WORD_BITS) for name in ("next_epoch", "flag_value", "is_ready")}
    return {**parts, **narrowed}


def _rank_operations(p: Parts, scenario: Scenario, rank: int) -> Iterator[Item]:
    epochs: dict[int, int] = {}
    for ordinal, collective in enumerate(scenario.calls):
        for tile in range(collective.tiles):
            # Calls are numbered by collective and tile, so that no two pieces of payload have one name.
            number = ordinal * 10 + tile
            pieces, decisions = _payload(number, collective, rank), collective.decisions
            call = Call(
                rank,
                scenario.ranks,
                tile,
                epochs.get(tile, scenario.epoch),
                pieces,
                partial(added, number, scenario.ranks),
            )
            epoch = yield from _driven(p[collective.of(rank)](p, call), number, decisions, rank)
            if epoch is None:
                return
            epochs[tile] = epoch


def _payload(number: int, collective: Collective, rank: int) -> Sequence[Any]:
    if collective.decisions is not None:
        return [Decided(number, rank, collective.decisions[rank])]
    return [Part(number, rank, piece) for piece in range(collective.pieces)]


def _driven(program: Any, number: int, decisions: tuple[int, ...] | None, rank: int) -> Generator[Item, None, Any]:
    """The program's operations, its loads answered with what they should find. Returns the epoch, None if it gave up.

    When a call has returned, its caller may write over the input at once, and does so here.
    """
    answer: object = None
    inputs: list[Place] = []
    operation: Any
    while True:
        try:
            operation = program.send(answer)
        except StopIteration as done:
            for written in inputs:
                yield Store(written, POISON), number, None, ""
            return done.value
        answer, wrong = None, ""
        if isinstance(operation, Load | Poll):
            answer = expected(number, operation.message, decisions)
        if isinstance(operation, Return):
            wrong = _wrong_result(operation, number, rank)
        place = getattr(operation, "place", None)
        if isinstance(place, Place) and place.area == "input" and place.agent == rank:
            inputs.append(place)
        yield operation, number, answer, wrong
        if isinstance(operation, Disagree):
            return None


def _sum_in_landing_order(ranks: int, terms: tuple[Any, ...]) -> object:
    """What an atomic sum holds: the right sum where all terms came in rank order, else what came when."""
    return added(terms[0].call, ranks, terms) if len(terms) == ranks else terms


def _wrong_result(operation: Return, number: int, rank: int) -> str:
    bad = [value for value in operation.values if not isinstance(value, Sum) or value.call != number]
    return f"agent {rank} returns {', '.join(map(str, bad))} in call {number}" if bad else ""
