"""Negative controls: broken variants of every protocol; a run that does not catch them proves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode_impl.parallel.programs import Parts
from validation.sync.exploring import first_violation, violation_of
from validation.sync.faulty import with_fault
from validation.sync.sentinels import checked
from validation.sync.stress_plan import StressPlan


@dataclass(frozen=True)
class Control:
    """One broken variant. `stress`: programs that show it on real memory; none where x86 or chance hide it."""

    fault: str
    variant: str
    stress: tuple[str, ...] = ()


CONTROLS = (
    Control("sync-no-entry-barrier", "missing barrier", ("in_place",)),
    Control("sync-flag-before-data", "flag before data", ("one_shot", "two_shot")),
    Control("sync-constant-epoch", "equality wait on a baked epoch", ("one_shot",)),
    Control("sync-shared-epoch", "shared counter across shapes", ("one_shot", "two_shot")),
    Control("sync-rearm-current", "re-arm at the wrong time", ("mail_without_flags",)),
    Control("sync-no-exit-barrier", "no exit barrier", ("in_place",)),
    Control("sync-parity-of-layer", "wrong parity on odd layers", ("one_shot",)),
    Control("sync-relaxed-flag", "flag without release"),
    Control("sync-relaxed-wait", "wait without acquire"),
    Control("sync-one-rank-two-shot", "no agreement", ("one_shot",)),
    Control("sync-unbounded-wait", "wait without a limit"),
    Control("sync-dependency-wait", "dependent launch without its wait"),
    Control("sync-stream-alias", "streams without a join"),
    Control("sync-counts-before-copy", "read before the copy landed"),
    Control("sync-pinned-reuse", "buffer rewritten before its copy ran"),
    Control("sync-shared-memory-reuse", "shared memory reused without a barrier"),
    Control("sync-layer-counter", "last layer not published"),
    Control("sync-atomic-order", "sum in the order of arrival"),
    Control("sync-one-chunk-pun", "partial row in another format"),
    Control("sync-planner-race", "table read before it is written"),
    Control("sync-cluster-exit", "block leaves its cluster early"),
    Control("sync-sentinel-after-cast", "-0 made by the rounding"),
)
"""The variants that the gate asks for, one at least for each protocol."""


def controls_explored(collectives: Parts, ranks: Sequence[int]) -> dict[str, Any]:
    """What exploration says of every control, as plain JSON."""
    return {control.fault: _explored(with_fault(collectives, control.fault), control, ranks) for control in CONTROLS}


def _explored(parts: Parts, control: Control, ranks: Sequence[int]) -> Mapping[str, Any]:
    found = first_violation(parts, ranks)
    if found is not None:
        scenario, trace, states = found
        events = len(trace.events)
        said = violation_of(scenario, trace, [control.fault])
        return {"caught": True, "scenario": scenario.name, "events": events, "states": states, **said}
    words = checked(parts)
    if words["sentinels"] or words["changed"]:
        violation = {"invariant": "no payload is the sentinel", "message": f"{words['example']} is sent as it"}
        return {"caught": True, "scenario": "sentinels", "events": 1, "states": 0, "violation": violation}
    return {"caught": False, "scenario": "", "events": 0, "states": 0, "violation": None}


def stress_controls(plan: StressPlan) -> list[StressPlan]:
    """The plans of the controls that real memory shows, short waits included: a control may hang."""
    return [
        replace(
            plan,
            fault=control.fault,
            kinds=control.stress,
            odd_one=(plan.ranks - 1, plan.steps // 2) if control.variant == "no agreement" else None,
        )
        for control in CONTROLS
        if control.stress
    ]
