"""Partial-order reduction: an action that nothing else can interfere with is taken at once, and alone.

An agent's next operation is such an action where it is local (a store goes into the agent's own buffer), or where
no store that anybody could land before the agent moves again touches its word in a way that matters. Which stores
those are is found by letting every other agent run ahead until it waits for something that only this agent could still
say. In the terms of the field these are persistent sets of one action; programs here have no cycles, so nothing is
put off for ever. `tests/validation/sync` compares with exploration without it.
"""

from __future__ import annotations

from validation.sync.machine import Action, Machine, State
from validation.sync.system import Kind, Step

_LOCAL = (Kind.STORE, Kind.RETURN, Kind.DISAGREE)

Writes = dict[int, set[int]]
"""Address -> numbers of values that may still land there."""


def alone(machine: Machine, state: State) -> Action | None:
    """An action that may be taken without looking at any other now; None where all must be tried."""
    system = machine.system
    for agent in machine.agents:
        at = state.at[agent]
        if not 0 <= at < len(system.steps[agent]):
            continue
        step = system.steps[agent][at]
        if step.kind in _LOCAL or (
            step.kind is not Kind.ADD
            and step.acquire
            and machine.enabled(state, agent, step)
            and (step.kind is Kind.DRAIN or _undisturbed(machine, state, agent, step))
        ):
            return Action("run", agent, at)
    return None


def _undisturbed(machine: Machine, state: State, agent: int, step: Step) -> bool:
    landing = _writes_without(machine, state, agent).get(step.address, ())
    if step.kind is Kind.WAIT:
        return all(step.ready(machine.system.values, value) for value in landing)
    return not landing


def _writes_without(machine: Machine, state: State, agent: int) -> Writes:
    """Everything that may land before `agent` executes its next operation."""
    system, writes = machine.system, Writes()
    for other in machine.agents:
        for index in state.buffers[other]:
            pending = system.steps[other][index]
            writes.setdefault(pending.address, set()).add(pending.value)
    cursors = {a: state.at[a] for a in machine.agents if a != agent and state.at[a] >= 0}
    moved = True
    while moved:
        moved = False
        for other, cursor in cursors.items():
            steps = system.steps[other]
            while cursor < len(steps) and _may_pass(machine, state, steps[cursor], writes):
                if steps[cursor].kind in (Kind.STORE, Kind.ADD):
                    writes.setdefault(steps[cursor].address, set()).add(steps[cursor].value)
                cursor += 1
            if cursor != cursors[other]:
                cursors[other], moved = cursor, True
    return writes


def _may_pass(machine: Machine, state: State, step: Step, writes: Writes) -> bool:
    if step.kind not in (Kind.WAIT, Kind.POLL):
        return True
    values = machine.system.values
    if step.ready(values, state.memory[step.address]):
        return True
    return any(step.ready(values, value) for value in writes.get(step.address, ()))
