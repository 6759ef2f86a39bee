"""The memory model: which actions a state allows, and what each one does.

An agent executes its operations in order. A store goes into the agent's *store buffer* and lands in memory later, at
any time: relaxed stores to different words in any order, a release store after every earlier one; stores to one word
stay in order. Loads take what has landed, or the agent's own latest store. No load passes an acquiring wait; past a
relaxed one, later loads may be carried out early. A *drain* waits until the buffer is empty. A landed store is seen by
everybody at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from decode_impl.parallel.operations import NOT_THERE, Poll, Store, Wait
from validation.sync.system import Kind, Step, System


class State(NamedTuple):
    """`at[a]` is agent a's next operation (~at once it has given up), `buffers[a]` its stores that have not landed,
    `early[a]` its later loads that are done already."""

    at: tuple[int, ...]
    buffers: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    early: tuple[int, ...]


class Action(NamedTuple):
    """`run`: an agent executes its operation `step`; `land`: its store `step` reaches memory; `time out` and `abort`:
    it gives up at its operation `step`."""

    what: str
    agent: int
    step: int


@dataclass(frozen=True)
class Violation:
    """A broken invariant: its name, and a sentence."""

    invariant: str
    message: str


class Machine:
    """Executes a system."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.agents = range(len(system.steps))

    def start(self) -> State:
        """Nothing has happened yet."""
        n = len(self.agents)
        return State((0,) * n, ((),) * n, self.system.start, (0,) * n)

    def step_of(self, action: Action) -> Step:
        """The operation that an action is about."""
        return self.system.steps[action.agent][action.step]

    def actions(self, state: State) -> Iterator[Action]:
        """Everything that can happen next."""
        for agent in self.agents:
            yield from self.landings(state, agent)
            at = state.at[agent]
            steps = self.system.steps[agent]
            if not 0 <= at < len(steps):
                continue
            step = steps[at]
            if self.enabled(state, agent, step):
                yield Action("run", agent, at)
            elif step.kind in (Kind.WAIT, Kind.POLL) and self.system.timeouts and _bounded(step):
                yield Action("time out", agent, at)
                if any(other < 0 for other in state.at):
                    yield Action("abort", agent, at)
            if step.kind is Kind.WAIT and not step.acquire:
                yield from self._early_loads(state, agent, at)

    def landings(self, state: State, agent: int) -> Iterator[Action]:
        """The agent's stores that may land now."""
        steps, seen = self.system.steps[agent], set()
        for place, index in enumerate(state.buffers[agent]):
            step = steps[index]
            if step.address not in seen and (place == 0 or not step.release):
                yield Action("land", agent, index)
            seen.add(step.address)

    def enabled(self, state: State, agent: int, step: Step) -> bool:
        """Whether the agent can execute its next operation."""
        if step.kind in (Kind.WAIT, Kind.POLL):
            return step.ready(self.system.values, self.read(state, agent, step.address))
        return step.kind not in (Kind.DRAIN, Kind.ADD) or not state.buffers[agent]

    def read(self, state: State, agent: int, address: int) -> int:
        """What the agent sees at an address: its own latest store, or memory."""
        if state.buffers[agent]:
            steps = self.system.steps[agent]
            for index in reversed(state.buffers[agent]):
                if steps[index].address == address:
                    return steps[index].value
        return state.memory[address]

    def apply(self, state: State, action: Action) -> tuple[State, Violation | None]:
        """The state after an action that is allowed, and the invariant that it breaks."""
        agent, step = action.agent, self.step_of(action)
        if action.what == "land":
            violation = self._unarmed(state, step)
            pending = tuple(i for i in state.buffers[agent] if i != action.step)
            return self._landed(state, agent, pending, step), violation
        if action.what in ("time out", "abort") or step.kind is Kind.DISAGREE:
            return state._replace(at=_with(state.at, agent, ~state.at[agent])), None
        if step.kind is Kind.STORE:
            queued = (*state.buffers[agent], action.step)
            return self._advanced(state._replace(buffers=_with(state.buffers, agent, queued)), agent), None
        if step.kind is Kind.ADD:
            return self._advanced(self._summed(state, step), agent), None
        violation = self._misread(state, agent, step) if step.kind in (Kind.LOAD, Kind.POLL) else None
        if step.wrong:
            violation = Violation("right result", step.wrong)
        if action.step != state.at[agent]:
            mask = state.early[agent] | 1 << action.step
            return state._replace(early=_with(state.early, agent, mask)), violation
        return self._advanced(state, agent), violation

    def ended(self, state: State) -> Violation | None:
        """What is wrong with a state in which nothing can happen any more."""
        system = self.system
        stuck = [a for a in self.agents if a not in system.dead and 0 <= state.at[a] < len(system.steps[a])]
        if stuck:
            where = "; ".join(f"agent {a} waits for ever {self._describe(a, state.at[a])}" for a in stuck)
            return Violation("every wait ends" if system.timeouts else "no deadlock", where)
        alive = [a for a in self.agents if a not in system.dead]
        failed = [a for a in alive if state.at[a] < 0]
        if not failed or (len(failed) == len(alive) and not system.timeouts):
            return None
        if not system.timeouts:
            return Violation("all decide alike", f"agents {failed} gave up, the others went on")
        first = min(self._calls_done(a, ~state.at[a]) for a in failed)
        ahead = [a for a in alive if a not in failed and self._calls_done(a, state.at[a]) > first + 1]
        if ahead:
            return Violation("all fail together", f"agents {failed} gave up in call {first}, {ahead} went on for good")
        return None

    def _calls_done(self, agent: int, at: int) -> int:
        return sum(step.kind is Kind.RETURN for step in self.system.steps[agent][:at])

    def _describe(self, agent: int, at: int) -> str:
        operation = self.system.steps[agent][at].operation
        if isinstance(operation, Wait | Poll):
            return (
                f"for agent {operation.source} (slot {operation.slot}, epoch {operation.epoch}, "
                f"call {self.system.steps[agent][at].call})"
            )
        return f"at {type(operation).__name__.lower()}"

    def _early_loads(self, state: State, agent: int, at: int) -> Iterator[Action]:
        steps = self.system.steps[agent]
        for index in range(at + 1, len(steps)):
            step = steps[index]
            if step.kind is Kind.LOAD:
                if not state.early[agent] >> index & 1:
                    yield Action("run", agent, index)
            elif step.kind is not Kind.WAIT or step.acquire:
                return

    def _advanced(self, state: State, agent: int) -> State:
        at, early, steps = state.at[agent] + 1, state.early[agent], self.system.steps[agent]
        while at < len(steps) and early >> at & 1:
            at += 1
        return state._replace(at=_with(state.at, agent, at))

    def _landed(self, state: State, agent: int, pending: tuple[int, ...], step: Step) -> State:
        memory = _with(state.memory, step.address, step.value)
        return state._replace(buffers=_with(state.buffers, agent, pending), memory=memory)

    def _summed(self, state: State, step: Step) -> State:
        values = self.system.values
        total = (*_terms(values[state.memory[step.address]]), values[step.value])
        number = self.system.number(self.system.sum_of(total))
        return state._replace(memory=_with(state.memory, step.address, number))

    def _unarmed(self, state: State, step: Step) -> Violation | None:
        if not (isinstance(step.operation, Store) and step.operation.into_armed):
            return None
        found = self.system.values[state.memory[step.address]]
        if found is NOT_THERE:
            return None
        place = self.system.places[step.address]
        return Violation("re-armed before the next use", f"{place} still holds {found} when call {step.call} lands")

    def _misread(self, state: State, agent: int, step: Step) -> Violation | None:
        found = self.read(state, agent, step.address)
        if found == step.value:
            return None
        value, wanted = self.system.values[found], self.system.values[step.value]
        call = getattr(value, "call", None)
        name = "no overwrite before the last read" if isinstance(call, int) and call > step.call else "no stale read"
        place = self.system.places[step.address]
        return Violation(name, f"agent {agent} reads {value} from {place} in call {step.call}, wants {wanted}")


def _with(items: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], value, *items[index + 1 :])


def _terms(total: object) -> tuple[object, ...]:
    return total if isinstance(total, tuple) else ()


def _bounded(step: Step) -> bool:
    return not isinstance(step.operation, Wait) or step.operation.bounded
