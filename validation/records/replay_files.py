"""Files under `replays/` of a run, one for each failure that can be had again by `decodegate replay FILE`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from validation.errors import UsageError, one_line
from validation.faults.base import Fault
from validation.gates.base import Context
from validation.gates.registry import load_gate
from validation.loading import load_faults
from validation.names import is_safe_name
from validation.profile import check_settings, profile_from
from validation.records.record import RunRecord
from validation.targets.registry import load_target

NUMERICS = "numerics"
_MOST = 20
"""Files of one gate."""


def replay_files(record: RunRecord) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of every replay file of a record; an entry of another form is left out."""
    for gate in record.stable.gates:
        kept = gate.metrics.get("replays")
        found = list(kept.items()) if isinstance(kept, dict) else []
        cases = gate.metrics.get("failing_cases")
        if gate.name == NUMERICS and isinstance(cases, list):
            found += [(str(place), _numerics(record, case)) for place, case in enumerate(cases, 1)]
        for name, content in found[:_MOST]:
            if isinstance(content, dict) and is_safe_name(f"{gate.name}-{name}"):
                yield f"{gate.name}-{name}", content


def _numerics(record: RunRecord, case: Any) -> dict[str, Any]:
    stable = record.stable
    return {
        "kind": NUMERICS,
        "profile": dict(stable.profile.content),
        "seed": stable.seed,
        "faults": [fault.id for fault in stable.faults],
        "case": case,
    }


def numerics_again(content: Mapping[str, Any]) -> list[str]:
    """Measure one case of the numerics gate again; what is wrong with it now.

    Raises:
        UsageError: the file's content is not such a case, or names what is not here.
    """
    profile = profile_from(content.get("profile") or {}, "profile of the replay file")
    seed, faults = content.get("seed"), content.get("faults")
    if type(seed) is not int or not 0 <= seed < 2**63 or not isinstance(faults, list):
        raise UsageError("not a case to replay: seed is a whole number from 0, faults a list of fault ids")
    if NUMERICS not in profile.gates:
        raise UsageError("not a case to replay: its profile has no numerics gate")
    settings = {**profile.gates[NUMERICS], "replay": [content.get("case")]}
    profile = profile.model_copy(update={"gates": {NUMERICS: settings}})
    gate = load_gate(NUMERICS)
    check_settings(profile, [gate])
    section = profile.target
    context = Context(
        target=load_target(section.kind, profile.model.folder(), section.options),
        baseline=profile.baseline.arm("baseline"),
        candidate=replace(profile.candidate.arm("candidate"), faults=tuple(map(fault_named, faults))),
        seed=seed,
        settings=settings,
    )
    units = [unit for unit in gate.plan(context) if unit.id.startswith("replay-")]
    judged = gate.judge({unit.id: gate.measure(unit, context) for unit in units}, context)
    return [f"{finding.component}: {finding.message}" for finding in judged.findings]


def sync_trace_again(content: Mapping[str, Any]) -> list[str]:
    """Carry out a trace of the explorer again, event by event; the trace where it still breaks an invariant.

    Raises:
        UsageError: the file's content is not such a trace, or names a fault that is not here.
    """
    from validation.sync.replays import trace_from
    from validation.sync.trace import replayed

    try:
        scenario, actions, faults = trace_from(content)
        system = scenario.system(_collectives(faults))
        trace = replayed(system, actions)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"not a trace to replay: {one_line(error)}") from error
    return str(trace).splitlines() if trace else []


def sync_delays_again(content: Mapping[str, Any]) -> list[str]:
    """Run a delay plan again, three times; what went wrong in the runs that failed.

    Raises:
        UsageError: the file's content is not such a plan, or names a fault that is not here.
    """
    from validation.sync.replays import plan_of
    from validation.sync.stress import stress

    try:
        plan = plan_of(content)
    except (ValueError, TypeError) as error:
        raise UsageError(f"not a delay plan to replay: {one_line(error)}") from error
    if plan.fault:
        fault_named(plan.fault)
    repeats = 1 if plan.kill else 3
    outcomes = stress([plan] * repeats)
    return [f"run {run}: {error}" for run, outcome in enumerate(outcomes, 1) for error in outcome.errors]


def _collectives(faults: list[str]) -> Any:
    from decode_impl.parallel.table import PROTOCOL
    from validation.sync.faulty import with_fault

    parts = PROTOCOL
    for fault in faults:
        fault_named(fault)
        parts = with_fault(parts, fault)
    return parts


def fault_named(name: Any) -> Fault:
    """A fault of the catalogue that can be put in.

    Raises:
        UsageError: there is none of this id.
    """
    faults = load_faults()
    if not isinstance(name, str) or name not in faults or not faults[name].injectable:
        raise UsageError(f"no fault that can be put in is called {str(name)[:60]!r}; see decodegate faults")
    return faults[name]


def schedule_again(content: Mapping[str, Any]) -> list[str]:
    """Play a schedule of the fuzzer again; what is broken now."""
    from validation.fuzz.files import replay

    return replay(content)


PLAYERS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    NUMERICS: numerics_again,
    "schedule": schedule_again,
    "sync-trace": sync_trace_again,
    "sync-delays": sync_delays_again,
}
"""What plays a file again, by its `kind`: the lines that say what is wrong now, none where nothing is."""
