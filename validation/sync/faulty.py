"""Collectives with a fault of the catalogue in them, for controls and rank processes. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from decode_impl.parallel.programs import Parts
from validation.faults.sync import LAYER

COMPONENT = "collectives"
"""The part of an engine that these faults break."""


def with_fault(collectives: Parts, fault: str) -> Parts:
    """The parts with one fault of the catalogue in them.

    Raises:
        KeyError: no fault of synchronisation has this id.
    """
    found = {known.id: known for known in LAYER.faults}[fault]
    table: Callable[[], Parts] = found.mutate({COMPONENT: lambda: collectives})[COMPONENT]
    return table()
