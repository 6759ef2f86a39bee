"""Injecting one fault and asking the gates: a gate's own verdict says whether it was caught."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from validation.errors import describe, one_line
from validation.faults.base import GATES_BY_COST, Fault
from validation.faults.broken import BrokenFault
from validation.gates.base import Context, Gate, Json, Unit
from validation.gates.registry import load_gate
from validation.loading import load_faults
from validation.mutation.plan import can_see, units_for
from validation.mutation.shared import SharedTarget
from validation.records.jsonio import unpacked
from validation.run.executor import Failed, measure_unit
from validation.targets.base import Capability, Target
from validation.verdict import Verdict

HEALTHY = "healthy"
"""The unit that runs without any fault; it must be green."""

CAUGHT, MISSED, BLIND, ERROR = "caught", "missed", "cannot see it", "error"
"""What a gate says about a fault; `cannot see it` where the gate does not look at the broken component at all."""


@dataclass
class MutationGate:
    """Faults as units, so that the processes and folders of an ordinary run carry them.

    `settings` holds the settings of every gate asked; `first_only` stops at the first gate that catches a fault.
    `target` is opened through one shared wrapper of a process: the target of a unit's context remembers every arm.
    """

    settings: Mapping[str, Mapping[str, Json]]
    target: Target
    first_only: bool = False
    name: str = "mutate"
    layer: int = 0
    question: str = "Does every gate see what it should?"
    needs: frozenset[Capability] = frozenset({Capability.INJECT_FAULT})
    cost: str = "minutes"
    _shared: SharedTarget | None = field(default=None, repr=False)
    _component: str = ""

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """What every gate says about one fault, or with the id `healthy` about none.

        A fault that waits for a costlier gate than those asked costs nothing: nobody is asked.
        """
        if self._shared is None:
            self._shared = SharedTarget(self.target)
        context = replace(context, target=cast(Target, self._shared))
        gates = [load_gate(name) for name in self.settings]
        if unit.id == HEALTHY:
            return {gate.name: self._healthy(gate, unit.params["units"][gate.name], context) for gate in gates}
        fault = load_faults()[unit.id]
        if waits(fault, self.settings):
            return {}
        if fault.component != self._component:
            self._shared.forget()
            self._component = fault.component
        faulty = replace(context, candidate=replace(context.candidate, faults=(fault,)))
        said: dict[str, Json] = {}
        for gate in gates:
            said[gate.name] = self._asked(gate, fault, faulty)
            if said[gate.name].get("broken") or (self.first_only and said[gate.name]["says"] == CAUGHT):
                break
        return said

    def _asked(self, gate: Gate, fault: Fault, context: Context) -> dict[str, Json]:
        if not can_see(gate, fault):
            return {"says": BLIND, "units": 0}
        context = replace(context, settings=self.settings[gate.name])
        units = units_for(gate, context, fault)
        if not units:
            return {"says": BLIND, "units": 0}
        return asked(gate, units, context)

    def _healthy(self, gate: Gate, names: Sequence[str], context: Context) -> dict[str, Json]:
        context = replace(context, settings=self.settings[gate.name])
        planned = [unit for unit in gate.plan(context) if unit.id in set(names)]
        results, seconds = {}, 0.0
        for unit in planned:
            outcome = measure_unit(gate, unit, context)
            if isinstance(outcome, Failed):
                return {"says": ERROR, "units": len(planned), "reason": f"unit {unit.id}: {outcome.error}"}
            results[unit.id] = unpacked(outcome.result)
            seconds += outcome.seconds
        if not results:
            return {"says": "PASS", "units": 0, "reason": "no fault needs it", "seconds": 0.0}
        judged = gate.judge(results, context)
        return {"says": str(judged.verdict), "units": len(results), "reason": judged.summary, "seconds": seconds}


def waits(fault: Fault, gates: Collection[str]) -> bool:
    """Whether the gate that should see the fault is costlier than all of these."""
    cost = {name: place for place, name in enumerate(GATES_BY_COST)}
    return cost.get(fault.gate, 0) > max(cost.get(name, len(cost)) for name in gates)


def asked(gate: Gate, units: Sequence[Unit], context: Context) -> dict[str, Json]:
    """The gate's verdict on each unit alone, in order, until one fails; on all of them where its units belong together.

    Plain JSON with the finding that failed it.
    """
    together = not getattr(gate, "units_alone", True)
    results: dict[str, Any] = {}
    seconds = 0.0
    for tried, unit in enumerate(units, 1):
        outcome = measure_unit(gate, unit, context)
        said = {"units": tried, "unit": unit.id}
        if isinstance(outcome, Failed):
            broken = {"broken": True} if outcome.error.startswith(f"{BrokenFault.__name__}:") else {}
            return {"says": ERROR, **said, "reason": outcome.error, "seconds": seconds, **broken}
        seconds += outcome.seconds
        results = {**(results if together else {}), unit.id: cast(dict[str, Any], unpacked(outcome.result))}
        if together and tried < len(units):
            continue
        try:
            reason = _seen(gate, results, context)
        except Exception as error:
            return {"says": ERROR, **said, "reason": describe(error), "seconds": seconds}
        if reason:
            return {"says": CAUGHT, **said, "reason": one_line(reason), "seconds": seconds}
    return {"says": MISSED, "units": len(units), "seconds": seconds}


def _seen(gate: Gate, results: Mapping[str, dict[str, Any]], context: Context) -> str:
    """The first finding of a gate that turns red, empty where it does not.

    Red without a finding means that nothing was judged here: that is no evidence against the fault. A gate that was
    given all its units, refuses to decide and says what is wrong (answers that are none, say) has seen the fault; with
    one unit alone it may lack the others only.
    """
    judged = gate.judge(results, context)
    if not judged.findings or judged.verdict not in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        return ""
    if judged.verdict is Verdict.FAIL:
        return judged.findings[0].message
    return "" if getattr(gate, "units_alone", True) else f"no verdict: {judged.findings[0].message}"
