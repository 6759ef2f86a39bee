"""Which gates and units can see a fault, cheapest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from validation.faults.base import ENGINE, GATES_BY_COST, Fault
from validation.gates.base import Context, Gate, Unit
from validation.gates.parity import containment, rejection, sampler

CELLS_TRIED = 1
"""Decode cells of the parity gate that a fault of an op is judged on, the cheapest of the profile that can show it: a
cell takes seconds, and the numerics gate is the one that should see such a fault. A miss is a miss of that cell."""

_LIKELY = {
    "state_cache": ("slot-reuse", "page-pressure", "warm-prefix", "one-token-prompts"),
    "latent_cache": ("slot-reuse", "page-pressure"),
    "prefix_cache": ("page-pressure", "warm-prefix"),
    "build_batch": ("one-token-prompts", "chunks", "batch-bins", "verify-steps"),
    "engine": ("preemption", "verify-caches", "verify-steps", "batch-bins", "state-hash"),
}
"""Schedules that a broken part of an engine is likely to show in, tried first."""

_ASKED_APART = {
    "accept": (rejection.UNIT,),
    "sample": (sampler.UNIT, containment.UNIT),
    "drafter": (containment.UNIT,),
}
"""Parts that schedules and cells, whose tokens and drafts are given, never run, and the units that ask them."""

_SUMMED = ("all_reduce", "output_mix", "moe_tail")
"""Ops that sum over ranks: one rank shows nothing of it, so a cell with several is tried first."""

_COLLECTIVES = "collectives"
"""The part of an engine that only the sync gate looks at."""

_EXPLORED = ("launches", "collectives", "stalls", "sentinels")
"""Units of the sync gate that explore, by what they are called."""

_SHARDED = "decode context parallelism"
"""The layer whose faults only cells with context parallelism show, whether of an op or of the engine."""

_SPECULATIVE = ("kda_verify",)
"""Ops that run in verify steps alone, which schedules and cells with drafts have."""


def can_see(gate: Gate, fault: Fault) -> bool:
    """Whether the gate looks at what the fault breaks: ops alone for the numerics gate, collectives alone for the sync
    gate and nobody else, whole decodes for others. An equivalent fault is shown to the gate that would see it, and to
    cheaper ones: what those do not tell apart, costlier ones cannot."""
    if fault.equivalent and _cost(gate.name) > _cost(fault.gate):
        return False
    if gate.name == "sync" or fault.component == _COLLECTIVES:
        return gate.name == "sync" and fault.component == _COLLECTIVES
    return gate.name != "numerics" or fault.paths != (ENGINE,)


def units_for(gate: Gate, context: Context, fault: Fault) -> list[Unit]:
    """The gate's units that can see the fault, those first that are likely to and cost little."""
    units = list(gate.plan(context))
    if gate.name == "numerics":
        own = [unit for unit in units if unit.params.get("op", fault.component) == fault.component]
        return sorted(own, key=lambda unit: _op_cost(unit.params))
    if gate.name == "sync":
        return sorted((unit for unit in units if _place(unit) >= 0), key=lambda unit: (_place(unit), unit.id))
    if gate.name != "parity":
        return units
    likely = _LIKELY.get(fault.component, ())
    schedules = sorted((unit for unit in units if "schedule" in unit.params), key=lambda unit: _rank(unit, likely))
    decoding = sorted((unit for unit in units if "batch" in unit.params), key=_cell_cost(context.settings))
    if fault.layer == _SHARDED:
        return [unit for unit in decoding if "dcp" in unit.params]
    decoding = [unit for unit in decoding if "dcp" not in unit.params]
    verifying, cells = ([u for u in decoding if ("drafts" in u.params) == drafts] for drafts in (True, False))
    if fault.paths == (ENGINE,):
        if fault.component in _ASKED_APART:
            return [unit for unit in units if unit.id in _ASKED_APART[fault.component]]
        if _cost(fault.gate) > _cost(gate.name):
            return [unit for unit in schedules if unit.params["schedule"] in likely]
        # A schedule compares an arm with itself: what is wrong alike in both shows against the baseline only.
        return [*schedules, *(unit for unit in units if "fuzz" in unit.params), *cells[:1]]
    if fault.component in _SPECULATIVE:
        return [*(unit for unit in schedules if "verify" in unit.id), *verifying]
    summed = [unit for unit in cells if unit.params["tp"] > 1][:1] if fault.component in _SUMMED else []
    return [*summed, *(unit for unit in cells if unit not in summed)][:CELLS_TRIED]


def _cost(gate: str) -> int:
    """A gate's place among the gates by cost; one that is not among them is asked whatever it costs."""
    return GATES_BY_COST.index(gate) if gate in GATES_BY_COST else 0


def _place(unit: Unit) -> int:
    """Place of a unit of the sync gate that explores; -1 for stress and controls, which say the same later."""
    name = unit.id.partition("-")[0]
    return _EXPLORED.index(name) if name in _EXPLORED else -1


def components_first(faults: Sequence[Fault]) -> list[Fault]:
    """Faults ordered so that those of one component, which share measurements, are neighbours."""
    return sorted(faults, key=lambda fault: (fault.paths, fault.component, fault.id))


def _rank(unit: Unit, likely: Sequence[str]) -> int:
    """Likely schedules first; among the others the profile's order stays."""
    name = unit.params["schedule"]
    return likely.index(name) if name in likely else len(likely)


def _op_cost(params: Any) -> tuple[bool, bool, int]:
    """Probes last, model width before shard width, eight rows before more or fewer: one row has no padding."""
    rows = int(params.get("rows", 8))
    return "probe" in params, params.get("width", "model") != "model", abs(rows - 8)


def _cell_cost(settings: Any) -> Any:
    least = settings.get("min_sequences", 1)
    return lambda unit: (-(-max(unit.params["batch"], least) // unit.params["batch"]), unit.params["tp"], unit.id)
