"""The gates by name. A gate's module is imported when the gate is asked for, not before."""

from __future__ import annotations

from typing import cast

from validation.errors import UsageError
from validation.gates.base import Gate
from validation.loading import load_object

GATES: dict[str, str] = {
    "numerics": "validation.gates.numerics.gate:NumericsGate",
    "parity": "validation.gates.parity.gate:ParityGate",
    "sync": "validation.gates.sync.gate:SyncGate",
    "stability": "validation.gates.stability.gate:StabilityGate",
    "evals": "validation.gates.evals.gate:EvalsGate",
}
"""Gate name -> `module:attribute` of a factory without arguments."""


def load_gate(name: str) -> Gate:
    """The gate of this name.

    Raises:
        UsageError: no such gate, or it cannot be imported here.
    """
    if name not in GATES:
        raise UsageError(f"no gate is called {name!r}; gates: {', '.join(sorted(GATES))}")
    gate = cast(Gate, load_object(GATES[name], f"gate {name!r}")())
    if gate.name != name:
        raise UsageError(f"gate {name!r} calls itself {gate.name!r}; both names must be the same")
    return gate


def by_layer(gates: list[Gate]) -> list[Gate]:
    """The gates in the order in which they run: cheap layers first, by name within a layer."""
    return sorted(gates, key=lambda gate: (gate.layer, gate.name))
