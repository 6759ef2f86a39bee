"""What exploration measures, as plain JSON: states by scenario, and the shortest trace of the first violation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from decode_impl.parallel.programs import Parts
from validation.sync.explore import Explorer
from validation.sync.replays import trace_document
from validation.sync.scenario import Scenario
from validation.sync.scenarios import all_scenarios, collectives, disagreement, launches, stalls
from validation.sync.trace import Trace, trace_of

MOST_STATES = 2_000_000
"""States of one scenario after which exploration stops, incomplete: about 2 GB."""

SHORT_TRACE = 30
"""Events that a person takes in at a glance."""

_WALK_STEPS = 1_000_000


def scenarios_of(group: str, parts: Parts) -> list[Scenario]:
    """The scenarios of a unit: `launches`, `collectives-N` or `stalls-N`."""
    name, _, ranks = group.partition("-")
    if name == "launches":
        return launches()
    if name == "stalls":
        return list(stalls(parts, int(ranks)))
    return [*collectives(int(ranks)), disagreement(int(ranks))]


def explored(scenarios: Iterable[Scenario], parts: Parts, faults: Sequence[str]) -> dict[str, Any]:
    """Explore each scenario exhaustively. `faults` names what `parts` has in it, for replays."""
    found: dict[str, Any] = {}
    for scenario in scenarios:
        result = Explorer(scenario.system(parts), most_states=MOST_STATES).exhaust()
        found[scenario.name] = {
            "states": result.states,
            "transitions": result.transitions,
            "complete": result.complete,
            "violation": None,
        }
        if result.violation:
            trace = trace_of(scenario.system(parts), result.actions)
            found[scenario.name] |= violation_of(scenario, trace, faults)
    return {"scenarios": found}


def violation_of(scenario: Scenario, trace: Trace, faults: Sequence[str]) -> dict[str, Any]:
    """A violation as plain JSON, with its trace."""
    return {"violation": asdict(trace.violation), "replay": trace_document(scenario, trace, faults)}


def walked(parts: Parts, ranks: int, walks: int, seed: int, faults: Sequence[str]) -> dict[str, Any]:
    """Random interleavings of scenarios too large to exhaust."""
    found: dict[str, Any] = {}
    for scenario in [*collectives(ranks), disagreement(ranks)]:
        system = scenario.system(parts)
        entry: dict[str, Any] = {"states": 0, "transitions": 0, "complete": True, "violation": None, "walks": 0}
        for walk in range(walks):
            result = Explorer(system, reduce=False).walk(seed + walk, _WALK_STEPS)
            entry["walks"] += 1
            entry["states"] += result.states
            entry["transitions"] += result.transitions
            if result.violation:
                entry |= violation_of(scenario, trace_of(system, result.actions), faults)
                break
        found[scenario.name] = entry
    return {"scenarios": found}


def first_violation(parts: Parts, ranks: Sequence[int]) -> tuple[Scenario, Trace, int] | None:
    """A violation with a short trace among the scenarios with these rank counts, and the states it took to find.

    The first trace of at most SHORT_TRACE events is taken; where none is so short, the shortest of all.
    """
    best: tuple[Scenario, Trace] | None = None
    states = 0
    for scenario in all_scenarios(parts, ranks):
        result = Explorer(scenario.system(parts)).exhaust()
        states += result.states
        if result.violation is None:
            continue
        trace = trace_of(scenario.system(parts), result.actions)
        if best is None or len(trace.events) < len(best[1].events):
            best = scenario, trace
        if len(trace.events) <= SHORT_TRACE:
            break
    return (*best, states) if best else None
