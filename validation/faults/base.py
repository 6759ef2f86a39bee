"""What a fault is: a named wrong variant of one component, put into a target from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Ops = Mapping[str, Callable[..., object]]
"""One path's table of ops, by the names of docs/ops.md (see decode_impl/ops.py for the calling conventions)."""


@dataclass(frozen=True)
class Fault:
    """A wrong variant of one op.

    `mutate` gets the ops of one path (`generic` or `specialized`) and returns the ops to put in their place;
    an op usually is wrapped, or given another value for one of its keyword-only *parts* by `functools.partial`.
    """

    id: str
    title: str
    component: str
    sources: tuple[str, ...]
    paths: tuple[str, ...]
    mutate: Callable[[Ops], Ops]

    def __reduce__(self) -> tuple[Any, ...]:
        """A fault of the catalogue pickles as its id: what it mutates with is code."""
        return _from_catalogue, (self.id,)


def _from_catalogue(fault_id: str) -> Fault:
    from validation.faults.catalogue import FAULTS  # the catalogue imports this module

    return FAULTS[fault_id]
