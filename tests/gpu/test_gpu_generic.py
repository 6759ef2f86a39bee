"""The generic path's CUDA form on a GPU: the generic contract, the exact contracts, capture, and whole decodes."""

from __future__ import annotations

import pytest
import torch
from generic_judgement import OWN, judge
from test_gpu_kernels import _median_error, decode, moved

from decode_impl import generic
from decode_impl.ops import OpTable, call_on_case
from decode_impl.runner import Paths
from decode_impl.specialized.contract import BATCH_BINS
from numerics.bounds import BF16, E4M3
from numerics.families import FAMILIES, K3_SHARD_16, MINI, make_case
from validation.gates.numerics.contracts import broken_contracts

EVERY_FAMILY = (1, 8, 64)
"""Bins at which all families run; the others run the first."""


def table() -> OpTable:
    from decode_impl.generic.gpu import OPS

    return OPS


def run(op: str, case: dict[str, object]) -> dict[str, torch.Tensor]:
    """The op's outputs for a case on the CPU, back on the CPU."""
    outputs = call_on_case(table(), op, {name: moved(x, "cuda") for name, x in case.items()}, in_place=True)
    return {name: moved(x, "cpu") for name, x in outputs.items()}


@pytest.mark.parametrize("rows", BATCH_BINS)
@pytest.mark.parametrize("op", OWN)
def test_an_op_stays_within_the_generic_contract(op: str, rows: int) -> None:
    for family in FAMILIES[op] if rows in EVERY_FAMILY else FAMILIES[op][:1]:
        requests = max(1, rows // MINI["verify_width"]) if op == "kda_verify" else rows
        case = make_case(op, MINI, family, requests, rows)
        judge(op, case, run(op, case), (family, rows))


@pytest.mark.parametrize("op", [op for op in OWN if op not in ("rms_norm", "attn_res", "kda_verify")])
def test_an_op_stays_within_the_generic_contract_at_k3s_shard_size(op: str) -> None:
    few = {"experts_held": 17, "projection_size": 1000}
    case = make_case(op, {**K3_SHARD_16, **few, "ranks": 2}, FAMILIES[op][0], 3, 0)
    judge(op, case, run(op, case), "K3")


@pytest.mark.parametrize("op", OWN)
def test_an_op_keeps_the_exact_contracts(op: str) -> None:
    """Unowned bytes, poison, NaN rows, null rows, unwritten memory, the same bits twice."""
    case = make_case(op, MINI, FAMILIES[op][0], 5, 1)
    broken = broken_contracts(op, case, lambda inputs: run(op, inputs), placement=False)
    assert not any(broken.values()), broken


@pytest.mark.parametrize("op", [op for op in OWN if op not in ("kda_step", "kda_verify", "mla_query")])
def test_a_replayed_graph_gives_the_bits_of_an_eager_call(op: str) -> None:
    case = {name: moved(x, "cuda") for name, x in make_case(op, MINI, FAMILIES[op][0], 8, 2).items()}
    eager = call_on_case(table(), op, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call_on_case(table(), op, case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call_on_case(table(), op, case)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(captured[name], x) for name, x in eager.items())


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_k3_mini_decoded_by_this_form_gives_the_logits_of_the_cpu_up_to_rounding(kv: str) -> None:
    # The runner captures and pads what it takes for the specialised path; here that is this form of the generic one.
    ours, cpu = decode("cuda", kv, Paths(table(), table())), decode("cpu", kv, Paths(generic.OPS, generic.OPS))
    plain = decode("cuda", kv, Paths(generic.OPS, generic.OPS))
    # BF16 roundings through eight layers, two dozen each; an E4M3 row may fall to the other side, once a MLA layer.
    floor = (16 * 24 * BF16.unit_roundoff**2 + (2 * E4M3.unit_roundoff**2 if kv == "fp8" else 0.0)) ** 0.5
    assert _median_error(ours, cpu) <= 2 * _median_error(plain, cpu) + floor
