"""What a fault is: a named wrong variant of one component, put into a target from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

Ops = Mapping[str, Callable[..., Any]]
"""One table of components by name: the ops of a path (docs/ops.md), or the parts of an engine."""

GENERIC, SPECIALIZED, ENGINE = "generic", "specialized", "engine"
PATHS = (GENERIC, SPECIALIZED, ENGINE)
"""The tables that a fault can change: either path's ops, or the engine's parts (caches, layout of a step, sampler)."""


GATES_BY_COST = ("numerics", "parity", "sync", "stability", "evals")
"""The gates that a fault can name, cheapest first."""


class Kind(StrEnum):
    """What sort of mistake a fault is. Faults are examples; a suite should see the kind."""

    LAYOUT = "layout"
    INDEX = "off by one"
    DROPPED = "dropped term"
    OPERAND = "wrong operand"
    CONSTANT = "wrong constant"
    SCALE = "wrong scale"
    ROUNDING = "rounding"
    OVERFLOW = "overflow"
    MASK = "missing mask"
    STALE = "stale data"
    OWNERSHIP = "ownership"
    REDUCTION = "reduction"
    ONE_BIN = "one bin only"
    SCHEDULE = "schedule"
    RACE = "race"
    SAMPLING = "sampling"
    ACCOUNTING = "accounting"


def unchanged(ops: Ops) -> Ops:
    """The change of a fault that is only declared: none."""
    return {}


@dataclass(frozen=True)
class Fault:
    """A wrong variant of one component.

    `mutate` gets one table of components and returns what to put in place of some; it is applied to every table of
    `paths`. A fault without paths is *declared*: the component that it breaks does not exist here yet.

    `gate` is the gate that should see it first; `missed_by` names common checks that do not. `equivalent` is the reason
    why no gate can or should tell the variant from the right one; `not_applicable` why it cannot be had here at all.
    `only_in` is the one layer that the fault is in; None for all of them.
    """

    id: str
    title: str
    component: str
    sources: tuple[str, ...]
    paths: tuple[str, ...]
    mutate: Callable[[Ops], Ops] = unchanged
    layer: str = ""
    kind: Kind = Kind.OPERAND
    gate: str = "numerics"
    missed_by: str = ""
    equivalent: str = ""
    not_applicable: str = ""
    only_in: int | None = None

    @property
    def injectable(self) -> bool:
        """False for a fault that is only declared."""
        return bool(self.paths)

    def __reduce__(self) -> tuple[Any, ...]:
        """A fault of the catalogue pickles as its id: what it mutates with is code."""
        return _from_catalogue, (self.id,)


def in_layer(fault: Fault, layer: int) -> Fault:
    """The fault in one layer only; its id is then `<id>@<layer>`."""
    return replace(fault, id=f"{fault.id}@{layer}", only_in=layer)


def _from_catalogue(fault_id: str) -> Fault:
    from validation.faults.catalogue import FAULTS  # the catalogue imports this module

    name, _, layer = fault_id.partition("@")
    return in_layer(FAULTS[name], int(layer)) if layer else FAULTS[name]
