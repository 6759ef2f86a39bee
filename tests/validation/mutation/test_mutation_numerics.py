"""Every fault of an op is caught by the numerics gate's own verdict, on the smallest unit that can show it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from small_k3 import context_of, small_target

from validation.faults.base import ENGINE, Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context
from validation.gates.numerics.gate import NumericsGate
from validation.mutation.measure import CAUGHT, asked
from validation.mutation.plan import units_for
from validation.mutation.shared import SharedTarget
from validation.profile import load_profile
from validation.targets.base import Target

OF_OPS = [
    fault
    for fault in FAULTS.values()
    if fault.injectable and fault.paths != (ENGINE,) and fault.gate == "numerics" and not fault.equivalent
]


@cache
def shared() -> SharedTarget:
    """The small model, with the baseline's measurements shared between the faults of this process."""
    return SharedTarget(small_target())


def context(fault: Fault | None = None) -> Context:
    settings: dict[str, Any] = dict(load_profile("premerge")[1].gates["numerics"])
    faults = () if fault is None else (fault,)
    return replace(context_of(settings, faults=faults), target=cast(Target, shared()))


@pytest.mark.parametrize("fault", OF_OPS, ids=[fault.id for fault in OF_OPS])
def test_a_fault_is_caught_and_named_by_its_op(fault: Fault) -> None:
    own = context(fault)
    shared().forget()
    gate = NumericsGate()
    said = asked(gate, units_for(gate, own, fault), own)
    assert said["says"] == CAUGHT, said
    assert fault.component in said["unit"] or fault.component in said["reason"]
