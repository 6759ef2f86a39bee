"""The builtin target on a device: what the gates see of the kernels is what the kernels did, and a broken one fails."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context, Gate, GateResult
from validation.gates.registry import load_gate
from validation.targets.base import ArmConfig, TargetError
from validation.targets.builtin import BuiltinTarget
from validation.targets.moving import Moved
from validation.verdict import Verdict

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

NUMERICS: dict[str, Any] = {
    "rows": [3],
    "sequence_rows": [17],
    "verify_rows": [2],
    "verify_widths": [3],
    "shard_rows": [1],
    "shards": [],
    "shape_rows": [2],
    "seeds": 1,
    "families": "in turn",
    "probes": [],
}
PARITY: dict[str, Any] = {
    "prompt_length": 24,
    "decode_length": 8,
    "min_sequences": 8,
    "most_sequences": 24,
    "schedules": ["slot-reuse", "verify-steps"],
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [8]}],
}


@cache
def target() -> BuiltinTarget:
    return BuiltinTarget.configured(None, {"device": "cuda"})


def judged(gate: Gate, settings: dict[str, Any], *faults: Fault) -> GateResult:
    candidate = ArmConfig("candidate", "latency_specialized", kv_cache_dtype="fp8", faults=faults)
    context = Context(target(), ArmConfig("baseline", kv_cache_dtype="fp8"), candidate, 0, settings)
    assert gate.settings_error(settings) is None
    return gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)


def test_the_target_says_that_the_kernels_run_and_on_what() -> None:
    fingerprint = target().fingerprint()
    assert fingerprint["specialised path"] == "kernels"
    assert fingerprint["device"] == torch.cuda.get_device_name()


def test_a_view_with_gaps_moves_with_all_that_lies_between() -> None:
    everything = torch.arange(24, dtype=torch.float32)
    gaps, tied = everything.as_strided((3, 2), (8, 1), 1), everything[4:12].view(torch.uint8)
    there = Moved(DEVICE)
    moved, other = there(gaps), there(tied)
    assert (moved.stride(), moved.storage_offset(), moved.device) == ((8, 1), 1, DEVICE)
    assert moved.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert torch.equal(moved.cpu(), gaps)
    moved.as_strided((24,), (1,), 0)[23] = 7
    back = Moved(CPU)(moved)
    assert (back.stride(), float(back.as_strided((24,), (1,), 0)[23])) == ((8, 1), 7)
    assert float(everything[23]) == 23
    there.write_back()
    assert float(everything[23]) == 7


def test_an_op_that_writes_to_its_inputs_on_the_device_is_seen() -> None:
    def mutate(ops: Any) -> Any:
        right = ops["rms_norm"]

        def writing(**arguments: Any) -> Any:
            result = right(**arguments)
            arguments["x"][0] = 0
            return result

        return {"rms_norm": writing}

    fault = Fault("writes", "writes to its input", "rms_norm", (), ("specialized",), mutate)
    arm = target().open(ArmConfig("candidate", "latency_specialized", faults=(fault,)))
    case: dict[str, Any] = {
        "x": torch.ones(2, 256, dtype=torch.bfloat16),
        "weight": torch.ones(256, dtype=torch.bfloat16),
        "eps": 1e-5,
    }
    assert all(isinstance(value, Tensor) and value.device == CPU for value in arm.run_op("rms_norm", case).values())
    assert float(case["x"][0].abs().sum()) == 0


@pytest.mark.parametrize(("gate", "settings"), [("numerics", NUMERICS), ("parity", PARITY)])
def test_a_gate_passes_the_kernels(gate: str, settings: dict[str, Any]) -> None:
    result = judged(load_gate(gate), settings)
    assert result.verdict == Verdict.PASS, [finding.message for finding in result.findings] or result.summary


def values_too_large(ops: Any) -> Any:
    """The kernel's result times 1.1, as a scale that was taken twice for once might make it."""
    right = ops["mla_value"]
    return {"mla_value": lambda **arguments: right(**arguments) * 1.1}


@pytest.mark.parametrize(("gate", "settings"), [("numerics", NUMERICS), ("parity", PARITY)])
def test_a_gate_fails_kernels_that_are_broken(gate: str, settings: dict[str, Any]) -> None:
    fault = Fault("values-too-large", "a tenth too large", "mla_value", (), ("specialized",), values_too_large)
    assert judged(load_gate(gate), settings, fault).verdict == Verdict.FAIL


def test_a_fault_of_an_ops_part_is_refused_where_the_op_is_of_one_piece() -> None:
    with pytest.raises(TargetError, match="op kda_step has no part 'delta'"):
        target().open(ArmConfig("candidate", "latency_specialized", faults=(FAULTS["kda-delta-dropped"],)))
