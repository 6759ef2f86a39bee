"""The fault catalogue: a fault changes its component and nothing else, in its own arm only, and travels by its id."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from small_k3 import small_target

from decode_impl.ops import OUTPUTS
from decode_impl.runner import BUILTIN_PATHS
from numerics.families import FAMILIES, MINI, make_case
from validation.faults.base import ENGINE, GATES_BY_COST, PATHS, Fault, Kind
from validation.faults.catalogue import FAULTS, LAYERS
from validation.faults.layer import Layer, at_rows, part_of
from validation.gates.registry import GATES
from validation.targets.base import ArmConfig, TargetError
from validation.targets.builtin import with_faults
from validation.targets.builtin_schedule import ENGINE_PARTS
from validation.targets.schedule import Run, Schedule, Submit

INJECTABLE = [fault for fault in FAULTS.values() if fault.injectable]
OF_OPS = [fault for fault in INJECTABLE if fault.paths != (ENGINE,)]
OF_ENGINES = [fault for fault in INJECTABLE if fault.paths == (ENGINE,)]
DECLARED = [fault for fault in FAULTS.values() if not fault.injectable]


def each(faults: list[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=[fault.id for fault in faults])


def arm_of(*faults: Fault, name: str = "candidate", ranks: int = 1) -> ArmConfig:
    backend = "latency_specialized" if name == "candidate" else "auto"
    return ArmConfig(
        name, backend, kv_cache_dtype="fp8", tensor_parallel=ranks, max_batch=2, max_context=48, faults=faults
    )


def outputs(config: ArmConfig, op: str, rows: int = 6) -> list[torch.Tensor]:
    """What an arm makes of a plain case, in bits."""
    arm = small_target().open(config)
    result = arm.run_op(op, make_case(op, {**MINI, "kda_num_heads": 2}, FAMILIES[op][0], rows, seed=0))
    return [tensor.contiguous().view(torch.uint8) for tensor in result.values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_ids_and_titles_are_unique_and_fit_a_command_line() -> None:
    every = [fault for layer in LAYERS for fault in layer.faults]
    assert len(every) == len(FAULTS)
    assert all(set(fault.id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for fault in every)
    assert [title for title, n in Counter(fault.title for fault in every).items() if n > 1] == []


def test_every_fault_says_what_it_is() -> None:
    for fault in FAULTS.values():
        assert fault.sources, fault.id
        assert all(fault.sources), fault.id
        assert fault.missed_by, fault.id
        assert isinstance(fault.kind, Kind), fault.id
        assert fault.gate in GATES_BY_COST, fault.id
        assert set(fault.paths) <= set(PATHS), fault.id
        assert not (fault.equivalent and fault.not_applicable), fault.id


def test_the_gates_that_a_fault_can_name_are_those_that_exist() -> None:
    assert set(GATES_BY_COST) == GATES.keys()


@each(INJECTABLE)
def test_a_fault_replaces_its_component_alone(fault: Fault) -> None:
    before = {"generic": BUILTIN_PATHS.generic, "specialized": BUILTIN_PATHS.specialized, ENGINE: ENGINE_PARTS}
    paths, parts = with_faults(BUILTIN_PATHS, ENGINE_PARTS, [fault])
    after = {"generic": paths.generic, "specialized": paths.specialized, ENGINE: parts}
    for table, components in before.items():
        assert components.keys() == after[table].keys()
        touched = {name for name in components if components[name] is not after[table][name]}
        assert touched == ({fault.component} if table in fault.paths else set())


@each(OF_OPS)
def test_a_fault_of_an_op_never_leaks_into_another_arm(fault: Fault) -> None:
    op = fault.component
    assert op in OUTPUTS
    clean = outputs(arm_of(), op)
    outputs(arm_of(fault), op)
    assert same(clean, outputs(arm_of(), op))


@each(OF_OPS)
def test_a_whole_decode_runs_with_a_fault_of_an_op_in_it(fault: Fault) -> None:
    arm = small_target().open(arm_of(fault, ranks=2))
    decode = arm.forced_decode([list(range(20)), list(range(20, 40))], 17)
    steps = list(decode)
    decode.close()
    assert len(steps) == 3


@each(OF_ENGINES)
def test_an_engine_with_a_faulty_part_can_be_built_and_run(fault: Fault) -> None:
    events = (Submit("only", tuple(range(9)), (1, 2)), Run())
    played = small_target().open(arm_of(fault)).generate(Schedule(events, max_batch=2, prefix_block=16))
    assert played.traces.keys() == {"only"}


@each(DECLARED)
def test_a_declared_fault_is_refused_with_what_is_missing(fault: Fault) -> None:
    with pytest.raises(TargetError, match=f"fault {fault.id} is only declared: there is no {fault.component!r}"):
        small_target().open(arm_of(fault))


@each(list(FAULTS.values()))
def test_a_fault_travels_by_its_id(fault: Fault) -> None:
    assert pickle.loads(pickle.dumps(fault)) is fault


def test_a_fault_outside_the_catalogue_does_not_travel() -> None:
    stranger = Fault("stranger", "made up", "route", (), ("specialized",), lambda ops: {})
    with pytest.raises(KeyError, match="stranger"):
        pickle.loads(pickle.dumps(stranger))


def test_two_faults_of_one_op_work_together_in_either_order() -> None:
    state, beta = FAULTS["kda-state-bf16"], FAULTS["kda-beta-bf16"]
    single = [outputs(arm_of(fault), "kda_step") for fault in (state, beta)]
    both = outputs(arm_of(state, beta), "kda_step")
    assert not same(both, single[0])
    assert not same(both, single[1])
    assert same(both, outputs(arm_of(beta, state), "kda_step"))


def test_a_part_is_found_behind_faults_that_wrapped_its_op() -> None:
    step = BUILTIN_PATHS.specialized["kda_step"]
    wrapped = FAULTS["kda-conv-shifted"].mutate({"kda_step": step})["kda_step"]
    assert part_of(wrapped, "delta") is part_of(step, "delta")


def test_an_op_of_one_piece_has_no_part_to_break_and_says_so() -> None:
    def kernel(*, x: Any) -> Any:
        return x

    layer = Layer("pieces", gate="numerics", sources="M1", missed_by="nothing")

    @layer.part("kernel", "delta", "pieces-delta", "another delta", kind=Kind.OPERAND)
    def _wrong(right: Any, *args: Any) -> Any:
        return right(*args)

    with pytest.raises(TargetError, match="op kernel has no part 'delta' that could be another: a fused kernel is"):
        layer.faults[0].mutate({"kernel": kernel})


def test_a_fault_of_one_batch_size_leaves_the_others_alone() -> None:
    double = at_rows(4, lambda op, *, x, **rest: op(x=x, **rest) * 2, "x")

    def twice(x: Any, w: int) -> Any:
        return double(lambda *, x, w: x * w, x=x, w=w)

    assert twice(torch.ones(4), 3).tolist() == [6.0] * 4
    assert twice(torch.ones(3), 3).tolist() == [3.0] * 3


def test_a_layer_writes_down_sources_and_defaults() -> None:
    layer = Layer("made up", kind=Kind.STALE)
    layer.declare("nothing", "made-up", "not there", sources="M01, M02", missed_by="all", gate="sync")
    [fault] = layer.faults
    assert (fault.sources, fault.kind, fault.layer, fault.injectable) == (("M01", "M02"), Kind.STALE, "made up", False)
