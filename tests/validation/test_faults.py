"""Faults of the catalogue: each changes its op and nothing else, in its own arm only, and travels by its id."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest
import torch
from small_k3 import small_target

from decode_impl.ops import OUTPUTS
from decode_impl.runner import BUILTIN_PATHS
from numerics.families import FAMILIES, MINI, make_case
from validation.faults import kda, mla, moe
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.targets.base import ArmConfig
from validation.targets.builtin import with_faults

each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


def arm_of(*faults: Fault, name: str = "candidate", kv: str = "fp8", ranks: int = 1) -> ArmConfig:
    backend = "latency_specialized" if name == "candidate" else "auto"
    return ArmConfig(
        name, backend, kv_cache_dtype=kv, tensor_parallel=ranks, max_batch=2, max_context=48, faults=faults
    )


@cache
def cases(op: str) -> list[dict[str, Any]]:
    """A case of every family; arms never change their inputs."""
    dims = {**MINI, "kda_num_heads": 1}
    return [make_case(op, dims, family, 6, seed=0) for family in FAMILIES[op]]


def outputs(config: ArmConfig, op: str) -> list[torch.Tensor]:
    """What an arm makes of a case of every family, in bits."""
    arm = small_target().open(config)
    results = [arm.run_op(op, case) for case in cases(op)]
    return [tensor.contiguous().view(torch.uint8) for result in results for tensor in result.values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_ids_are_unique_and_fit_a_command_line() -> None:
    every = [fault for module in (kda, mla, moe) for fault in module.FAULTS]
    assert len(every) == len(FAULTS)
    assert all(FAULTS[fault.id] is fault for fault in every)
    assert all(set(fault.id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for fault in every)
    assert len({fault.title for fault in every}) == len(every)


@each_fault
def test_a_fault_replaces_its_component_alone_on_paths_that_have_it(fault: Fault) -> None:
    assert fault.component in OUTPUTS
    assert fault.paths
    assert fault.sources
    for path in fault.paths:
        assert path in ("generic", "specialized")
        ops = getattr(BUILTIN_PATHS, path)
        replaced = fault.mutate(ops)
        assert replaced.keys() == {fault.component}
        assert replaced[fault.component] is not ops[fault.component]
    faulty = with_faults(BUILTIN_PATHS, [fault])
    for path in ("generic", "specialized"):
        before, after = getattr(BUILTIN_PATHS, path), getattr(faulty, path)
        assert before.keys() == after.keys()
        touched = {op for op in before if before[op] is not after[op]}
        assert touched == ({fault.component} if path in fault.paths else set())


@each_fault
def test_a_fault_changes_what_its_op_computes_and_never_leaks_into_another_arm(fault: Fault) -> None:
    op = fault.component
    baseline, clean = outputs(arm_of(name="baseline"), op), outputs(arm_of(), op)
    assert not same(clean, outputs(arm_of(fault), op))
    assert same(clean, outputs(arm_of(), op))
    assert same(baseline, outputs(arm_of(name="baseline"), op))


@each_fault
def test_a_whole_decode_runs_with_a_fault_in_it(fault: Fault) -> None:
    arm = small_target().open(arm_of(fault, ranks=2))
    decode = arm.forced_decode([list(range(20)), list(range(20, 40))], 16)
    steps = list(decode)
    decode.close()
    assert len(steps) == 4
    assert all(step.logits.isfinite().all() for step in steps)
    assert arm.counters().steps == {"generic": 1, "specialized": 4}


@each_fault
def test_a_fault_travels_by_its_id(fault: Fault) -> None:
    assert pickle.loads(pickle.dumps(fault)) is fault
    assert pickle.loads(pickle.dumps(arm_of(fault))) == arm_of(fault)


def test_a_fault_outside_the_catalogue_does_not_travel() -> None:
    stranger = Fault("stranger", "made up", "route", (), ("specialized",), lambda ops: {})
    with pytest.raises(KeyError, match="stranger"):
        pickle.loads(pickle.dumps(stranger))


def test_two_faults_of_one_op_work_together() -> None:
    state, beta = FAULTS["kda-state-bf16"], FAULTS["kda-beta-bf16"]
    single = [outputs(arm_of(fault), "kda_step") for fault in (state, beta)]
    both = outputs(arm_of(state, beta), "kda_step")
    assert not same(both, single[0])
    assert not same(both, single[1])
    assert same(both, outputs(arm_of(beta, state), "kda_step"))
