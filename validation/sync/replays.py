"""Files for `decodegate replay`: a trace of the explorer, or the delay plan of a stress run, with all it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from validation.sync.scenario import Collective, Scenario
from validation.sync.stress_plan import StressPlan, plan_from
from validation.sync.trace import Trace, action_of

TRACE, DELAYS = "sync-trace", "sync-delays"
"""Values of `kind`."""

_MOST = {"ranks": 64, "calls": 64, "tiles": 8, "pieces": 64, "actions": 100_000}


def trace_document(scenario: Scenario, trace: Trace, faults: Sequence[str]) -> dict[str, Any]:
    """A trace as a file: the scenario, the faults that were in, and what happened."""
    return {"kind": TRACE, "faults": list(faults), "scenario": asdict(scenario), **trace.document()}


def delays_document(plan: StressPlan) -> dict[str, Any]:
    """A delay plan as a file."""
    return {"kind": DELAYS, "plan": plan.document()}


def trace_from(document: Any) -> tuple[Scenario, list[Any], list[str]]:
    """Scenario, actions and faults of a trace's file.

    Raises:
        ValueError: what is wrong with the file, in one line.
    """
    if not isinstance(document, dict) or not {"scenario", "actions", "faults"} <= set(document):
        raise ValueError("a trace has the keys scenario, actions and faults")
    actions, faults = document["actions"], document["faults"]
    if not isinstance(actions, list) or len(actions) > _MOST["actions"]:
        raise ValueError(f"actions is a list of at most {_MOST['actions']}")
    if not isinstance(faults, list) or any(not isinstance(fault, str) for fault in faults):
        raise ValueError("faults is a list of ids")
    return _scenario(document["scenario"]), [action_of(item) for item in actions], faults


def plan_of(document: Any) -> StressPlan:
    """The plan of a delay plan's file.

    Raises:
        ValueError: what is wrong with the file, in one line.
    """
    if not isinstance(document, dict) or "plan" not in document:
        raise ValueError("a delay plan has the key plan")
    return plan_from(document["plan"])


def _scenario(document: Any) -> Scenario:
    if not isinstance(document, dict) or set(document) != set(Scenario.__dataclass_fields__):
        raise ValueError(f"a scenario has the keys {', '.join(Scenario.__dataclass_fields__)}")
    ranks, calls, stop = document["ranks"], document["calls"], document["stop"]
    if not _within(ranks, 2, _MOST["ranks"]):
        raise ValueError(f"ranks is {str(ranks)[:40]!r}, 2 to {_MOST['ranks']} are allowed")
    if not isinstance(calls, list) or not 0 < len(calls) <= _MOST["calls"]:
        raise ValueError(f"calls is a list of 1 to {_MOST['calls']}")
    if stop is not None and not (isinstance(stop, list) and len(stop) == 2 and all(_within(x, 0, 10**6) for x in stop)):
        raise ValueError("stop is null or [rank, operation]")
    if not isinstance(document["name"], str) or not _within(document["epoch"], -(2**31), 2**31):
        raise ValueError("name is a text, epoch a whole number")
    if type(document["timeouts"]) is not bool:
        raise ValueError("timeouts is true or false")
    made = tuple(_collective(call, ranks) for call in calls)
    return Scenario(
        document["name"], ranks, made, document["epoch"], tuple(stop) if stop else None, document["timeouts"]
    )


def _collective(document: Any, ranks: int) -> Collective:
    if not isinstance(document, dict) or set(document) != set(Collective.__dataclass_fields__):
        raise ValueError(f"a call has the keys {', '.join(Collective.__dataclass_fields__)}")
    program, decisions = document["program"], document["decisions"]
    programs = program if isinstance(program, list) else [program] * ranks
    if len(programs) != ranks or any(not isinstance(name, str) for name in programs):
        raise ValueError("program is a name, or one name per rank")
    if not _within(document["tiles"], 1, _MOST["tiles"]) or not _within(document["pieces"], 1, _MOST["pieces"]):
        raise ValueError(f"tiles is 1 to {_MOST['tiles']}, pieces 1 to {_MOST['pieces']}")
    if decisions is not None and not (
        isinstance(decisions, list) and len(decisions) == ranks and all(type(x) is int for x in decisions)
    ):
        raise ValueError("decisions is null, or one whole number per rank")
    return Collective(
        tuple(program) if isinstance(program, list) else program,
        document["tiles"],
        document["pieces"],
        None if decisions is None else tuple(decisions),
    )


def _within(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
