"""The fused kernels under Triton's interpreter: what the emulation's contract allows, and as near the oracle as it.

`tests/gpu/test_gpu_kernels.py` asks the same of the compiled kernels. Here they are also compiled for SM90, and the
assembler's word is taken on registers and spills.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_judgement import judge, outside

from decode_impl.deployment import DeploymentError
from decode_impl.ops import OpTable, call_on_case
from decode_impl.specialized import emulation
from decode_impl.specialized.implementation import EMULATION, implementation
from numerics.families import FAMILIES, MINI, make_case
from validation.gates.numerics.contracts import broken_contracts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, for its interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device runs the kernels themselves: tests/gpu"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

DIMS = {
    **MINI,
    "kda_num_heads": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 64,
    "num_experts_per_token": 3,
    "experts_held": 8,
    "moe_intermediate_size": 96,
}
ROWS = 3
"""Not a bin: the last tile of every kernel is cut short."""

OPS = sorted(emulation.OPS)


@pytest.fixture(scope="module")
def kernels() -> Iterator[OpTable]:
    """The kernels as the interpreter runs them; Triton reads the variable when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from decode_impl.specialized.kernels import OPS, common

        if not common.INTERPRETED:
            pytest.skip("the kernels were imported before this file, for a compiler")
        yield OPS


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_stays_within_the_contract_on_every_family(kernels: OpTable, op: str) -> None:
    for family in FAMILIES[op]:
        case = make_case(op, DIMS, family, ROWS - 1 if op == "kda_verify" else ROWS, 0)
        judge(op, case, call_on_case(kernels, op, case), family)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("kda_verify", "output_mix")])
def test_a_kernel_keeps_the_exact_contracts(kernels: OpTable, op: str) -> None:
    """Unowned bytes, poison in what must not be read, NaN rows, null rows, unwritten memory, the same bits twice.

    `kda_verify` is the kernel of `kda_step`, and `output_mix` those of `projection` and `attn_res`.
    """
    case = make_case(op, DIMS, FAMILIES[op][0], ROWS - 1, 1)
    broken = broken_contracts(op, case, lambda inputs: call_on_case(kernels, op, inputs), placement=False)
    assert not any(broken.values()), broken


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("rows", [2, 33])
def test_ranks_are_added_in_the_emulations_order(kernels: OpTable, ranks: int, rows: int) -> None:
    case = make_case("all_reduce", {**DIMS, "ranks": ranks, "hidden_size": 64}, "cancelling", rows, 0)
    got, wanted = (call_on_case(ops, "all_reduce", case)["y"] for ops in (kernels, emulation.OPS))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("ranks", [3, 8])
def test_attention_over_ranks_of_which_some_hold_no_key_stays_within_the_contract(kernels: OpTable, ranks: int) -> None:
    for family in ("iid_fp8", "towers_bf16"):
        case = make_case("mla_attend_dcp", {**DIMS, "ranks": ranks, "page_size": 4}, family, 9, 0)
        assert 0 < int(case["lengths"][case["lengths"] > 0].min()) < ranks
        judge("mla_attend_dcp", case, call_on_case(kernels, "mla_attend_dcp", case), family)


def test_a_split_projection_leaves_its_arrival_counters_at_zero(kernels: OpTable) -> None:
    from decode_impl.specialized.kernels import common, split_k

    case = make_case("projection", {**DIMS, "hidden_size": 1024, "projection_size": 64}, "iid", ROWS, 0)
    assert split_k.skinny_plan(ROWS, 1024, 64).splits > 1
    for _ in range(2):
        assert not any(outside("projection", case, call_on_case(kernels, "projection", case)).values())
    assert not common.counters(case["x"], 1).any()


def test_a_cpu_runs_the_emulation() -> None:
    assert implementation(torch.device("cpu")) == EMULATION


def test_a_wish_for_kernels_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODEGATE_KERNELS", "yes")
    with pytest.raises(DeploymentError, match="DECODEGATE_KERNELS is 'yes', allowed are 0"):
        implementation(torch.device("cpu"))


def test_compiled_for_sm90_at_k3s_shard_sizes_no_kernel_spills() -> None:
    """In a process of its own: kernels are either compiled or interpreted, by a variable that is read at import."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--rows", "1", "64", "--ranks", "16"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) >= 2 * len(OPS)
    assert [line for line in lines if " spills 0 " not in line] == []
