"""A violation as a short list of events that can be replayed, printed and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode_impl.parallel.operations import Poll, Wait
from validation.sync.machine import Action, Machine, State, Violation
from validation.sync.system import Kind, Step, System


@dataclass(frozen=True)
class Event:
    """One line of a trace. `issued` is the event behind which a store was issued, where it landed later than that."""

    agent: int
    what: str
    text: str
    issued: int | None = None


@dataclass(frozen=True)
class Trace:
    """What happened, in order, until an invariant broke."""

    violation: Violation
    actions: tuple[Action, ...]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [f"{place:3}  agent {event.agent}  {event.text}" for place, event in enumerate(self.events, 1)]
        return "\n".join([*lines, f"     {self.violation.invariant}: {self.violation.message}"])

    def document(self) -> dict[str, Any]:
        """The trace as plain JSON, without the scenario it belongs to."""
        return {
            "violation": asdict(self.violation),
            "actions": [list(action) for action in self.actions],
            "events": [asdict(event) for event in self.events],
        }


def trace_of(system: System, actions: Sequence[Action]) -> Trace:
    """The shortest trace that can be had from these actions by leaving out what the violation does not depend on.

    Raises:
        ValueError: the actions break no invariant.
    """
    machine = Machine(system)
    violation = outcome(machine, actions)
    if violation is None:
        raise ValueError("these actions break no invariant")
    kept = list(actions)
    if violation.invariant not in _OF_ENDS:
        slice_ = [action for action, needed in zip(actions, _needed(machine, actions), strict=True) if needed]
        shorter = outcome(machine, slice_)
        if shorter is not None and shorter.invariant == violation.invariant:
            kept, violation = slice_, shorter
    return Trace(violation, tuple(kept), tuple(_events(machine, kept)))


_OF_ENDS = ("no deadlock", "every wait ends", "all decide alike", "all fail together")
"""Invariants of states in which nothing can happen any more: all that led there belongs to them."""


def outcome(machine: Machine, actions: Sequence[Action]) -> Violation | None:
    """The invariant that these actions break, the last of them or the end behind it.

    An action that is not possible where it stands makes the list as good as empty: None.
    """
    state = machine.start()
    for place, action in enumerate(actions):
        if action not in set(machine.actions(state)):
            return None
        state, violation = machine.apply(state, action)
        if violation is not None:
            return violation if place == len(actions) - 1 else None
    return machine.ended(state) if next(machine.actions(state), None) is None else None


def _needed(machine: Machine, actions: Sequence[Action]) -> list[bool]:
    """Which actions the last one depends on: through its agent's order, and through the words that it reads."""
    needs = [False] * len(actions)
    needs[-1] = True
    for place in reversed(range(len(actions))):
        if needs[place]:
            for earlier in _causes(machine, actions, place):
                needs[earlier] = True
    return needs


def _causes(machine: Machine, actions: Sequence[Action], place: int) -> list[int]:
    """Earlier actions without which this one could not happen as it did."""
    action = actions[place]
    step, own, steps = machine.step_of(action), action.agent, machine.system.steps[action.agent]
    before = list(enumerate(actions[:place]))
    if action.what == "land":
        issue = [i for i, o in before if (o.what, o.agent, o.step) == ("run", own, action.step)]
        earlier = [(i, steps[o.step]) for i, o in before if (o.what, o.agent) == ("land", own) and o.step < action.step]
        return issue + [i for i, other in earlier if step.release or other.address == step.address]
    causes = [i for i, o in before if o.agent == own and o.what != "land"][-1:]
    if step.kind in (Kind.WAIT, Kind.POLL, Kind.LOAD):
        causes += [i for i, o in before if o.what == "land" and machine.step_of(o).address == step.address][-1:]
    if step.kind in (Kind.LOAD, Kind.ADD):
        causes += [i for i, o in before if machine.step_of(o).kind is Kind.ADD]
    if step.kind in (Kind.DRAIN, Kind.ADD):
        causes += [i for i, o in before if o.agent == own and o.what == "land"]
    if action.what == "abort":
        causes += [i for i, o in before if o.what in ("time out", "abort")][:1]
    return causes


def _events(machine: Machine, actions: Sequence[Action]) -> list[Event]:
    """Lines for what can be seen of the actions: landings, waits, loads, sums and giving up."""
    system, events = machine.system, list[Event]()
    issued: dict[tuple[int, int], int] = {}
    landing = {(a.agent, a.step) for a in actions if a.what == "land"}
    state: State = machine.start()
    for action in actions:
        step = machine.step_of(action)
        if action.what == "run" and step.kind is Kind.STORE:
            issued[action.agent, action.step] = len(events)
            if (action.agent, action.step) not in landing:
                text = f"stores {_value(system, step)} into {system.places[step.address]}, not landed"
                events.append(Event(action.agent, "issue", text))
        elif action.what != "run" or step.kind not in (Kind.DRAIN, Kind.RETURN):
            text = _text(machine, state, action, step)
            since = issued.get((action.agent, action.step)) if action.what == "land" else None
            late = since is not None and since < len(events)
            events.append(Event(action.agent, _what(action, step), text, since if late else None))
        state, _ = machine.apply(state, action)
    return events


def _what(action: Action, step: Step) -> str:
    if action.what == "land":
        return "flag" if step.release else "store"
    return step.kind.name.lower() if action.what == "run" else action.what


def _text(machine: Machine, state: State, action: Action, step: Step) -> str:
    system, operation = machine.system, step.operation
    if action.what == "land":
        return f"{_value(system, step)} lands in {system.places[step.address]}" + " (release)" * step.release
    if isinstance(operation, Wait | Poll):
        about = f"agent {operation.source}, slot {operation.slot}, epoch {operation.epoch}"
        if action.what != "run":
            return f"{'times out' if action.what == 'time out' else 'is told to give up'} waiting for {about}"
    seen = system.values[machine.read(state, action.agent, step.address)] if step.address >= 0 else ""
    place = system.places[step.address] if step.address >= 0 else ""
    if step.kind is Kind.WAIT:
        return f"waits at {place}, sees {seen}"
    if step.kind is Kind.ADD:
        return f"adds {_value(system, step)} to {place}"
    if step.kind is Kind.DISAGREE:
        return "sees another decision and gives up"
    early = " early" if action.step != state.at[action.agent] else ""
    return f"reads{early} {seen} from {place} in call {step.call}"


def _value(system: System, step: Step) -> str:
    return str(system.values[step.value])


def action_of(item: Any) -> Action:
    """An action from its JSON.

    Raises:
        ValueError: not an action.
    """
    valid = isinstance(item, list) and len(item) == 3 and item[0] in ("run", "land", "time out", "abort")
    if not (valid and type(item[1]) is int and type(item[2]) is int and item[1] >= 0 and item[2] >= 0):
        raise ValueError(f"an action is [what, agent, step], not {str(item)[:60]!r}")
    return Action(*item)


def replayed(system: System, actions: Sequence[Action]) -> Trace | None:
    """The trace of these actions on this system, None where they are not possible or break nothing there."""
    machine = Machine(system)
    fits = all(a.agent < len(system.steps) and a.step < len(system.steps[a.agent]) for a in actions)
    violation = outcome(machine, actions) if fits else None
    return Trace(violation, tuple(actions), tuple(_events(machine, actions))) if violation else None
