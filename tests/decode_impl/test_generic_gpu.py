"""The generic path's CUDA form under Triton's interpreter: the generic contract, as near the oracle as the plain ops.

`tests/gpu/test_gpu_generic.py` asks the same of the compiled kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from generic_judgement import OWN, judge

from decode_impl import generic
from decode_impl.ops import OpTable, call_on_case
from numerics.families import FAMILIES, MINI, make_case
from validation.gates.numerics.contracts import broken_contracts

pytestmark = [
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
SLOW = ("experts", "kda_step", "kda_verify", "mla_attend")
"""Ops that take the interpreter seconds a case: one family here, all of them on a GPU."""


@pytest.fixture(scope="module")
def ops() -> Iterator[OpTable]:
    """The table as the interpreter runs it; Triton reads the variable when kernels are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from decode_impl.generic import gpu
        from decode_impl.specialized.kernels import common

        if not common.INTERPRETED:
            pytest.skip("the kernels were imported before this file, for a compiler")
        yield gpu.OPS


def test_every_op_of_a_decode_step_has_a_form_of_its_own(ops: OpTable) -> None:
    assert {name for name, op in ops.items() if op is not generic.OPS[name]} == set(OWN)


@pytest.mark.parametrize("op", OWN)
def test_an_op_stays_within_the_generic_contract_on_every_family(ops: OpTable, op: str) -> None:
    for family in FAMILIES[op][: 1 if op in SLOW else None]:
        case = make_case(op, DIMS, family, 2 if op == "kda_verify" else 3, 0)
        judge(op, case, call_on_case(ops, op, case), family)


@pytest.mark.parametrize("op", [op for op in OWN if op not in ("kda_verify", "output_mix", "experts")])
def test_an_op_keeps_the_exact_contracts(ops: OpTable, op: str) -> None:
    """Unowned bytes, poison in what must not be read, NaN rows, null rows, unwritten memory, the same bits twice."""
    case = make_case(op, DIMS, FAMILIES[op][0], 2, 1)
    broken = broken_contracts(op, case, lambda inputs: call_on_case(ops, op, inputs), placement=False)
    assert not any(broken.values()), broken


@pytest.mark.parametrize("pairs", [1, 40, 1030])
def test_pairs_are_ordered_by_expert_and_cut_into_blocks(ops: OpTable, pairs: int) -> None:
    from decode_impl.generic.gpu.experts import ordered

    ids = torch.randint(0, 7, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    order, work = ordered(ids, 8)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    starts = work.nonzero().flatten().tolist()
    assert int(work.sum()) == pairs
    assert starts == [0, *(start + int(work[start]) for start in starts[:-1])]
    chosen = ids.flatten()[order.long()]
    assert all(len(chosen[s : s + int(work[s])].unique()) == 1 for s in starts)
    # No two blocks of an expert are both short: its weights are read no more often than its pairs need.
    assert all(sum(int(work[s]) < 8 for s in starts if chosen[s] == e) <= 1 for e in range(7))
