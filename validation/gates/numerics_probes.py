"""Probes of the numerics gate: what a grid, a table or a long run shows and single random cases do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from validation.gates.base import Context, Json, Unit


@dataclass(frozen=True)
class Probe:
    """One kind of probe: the ops that it is about, its units, and how one is measured."""

    ops: Collection[str]
    plan: Callable[[Sequence[str], Context], list[Unit]]
    measure: Callable[[Unit, Context], dict[str, Json]]


PROBES: Mapping[str, Probe] = {}
