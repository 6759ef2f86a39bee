"""The fused kernels on a GPU: the specialised path's contract, the fp64 oracles, the exact contracts, whole decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_judgement import Case, judge
from torch import Tensor

from decode_impl import generic
from decode_impl.batch import Chunk
from decode_impl.checkpoint import load_checkpoint
from decode_impl.deployment import Deployment
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.ops import call_on_case
from decode_impl.runner import SPECIALIZED, ModelRunner, Paths
from decode_impl.specialized import emulation
from decode_impl.specialized.contract import BATCH_BINS
from decode_impl.specialized.implementation import EMULATION, KERNELS, implementation
from decode_impl.weights import shard_weights
from numerics.bounds import BF16, E4M3
from numerics.families import FAMILIES, K3_SHARD_8, K3_SHARD_16, MINI, make_case
from numerics.metrics import error_stats
from validation.gates.numerics.contracts import broken_contracts

OPS = sorted(emulation.OPS)
EVERY_FAMILY = (1, 8, 64)
"""Bins at which all families run; the others run the first."""

PAST_INT32 = 2**31
TABLES = Paths(generic.OPS, emulation.OPS)


def moved(x: Any, device: str) -> Any:
    """A tensor on another device with the same strides, gaps between its rows included."""
    if not isinstance(x, Tensor):
        return x
    if x.is_contiguous():
        return x.to(device)
    elements = x.untyped_storage().nbytes() // x.element_size()
    everything = x.as_strided((elements,), (1,), 0).to(device)
    return everything.as_strided(x.size(), x.stride(), x.storage_offset())


def run(op: str, case: Case) -> dict[str, Tensor]:
    """The kernel's outputs for a case on the CPU, back on the CPU."""
    from decode_impl.specialized.kernels import OPS

    outputs = call_on_case(OPS, op, {name: moved(x, "cuda") for name, x in case.items()}, in_place=True)
    return {name: moved(x, "cpu") for name, x in outputs.items()}


def test_a_cuda_device_runs_the_kernels_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("", "1"):
        monkeypatch.setenv("DECODEGATE_KERNELS", wanted)
        assert implementation(torch.device("cuda")) == KERNELS
    monkeypatch.setenv("DECODEGATE_KERNELS", "0")
    assert implementation(torch.device("cuda")) == EMULATION


@pytest.mark.parametrize("rows", BATCH_BINS)
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_stays_within_the_contract(op: str, rows: int) -> None:
    for family in FAMILIES[op] if rows in EVERY_FAMILY else FAMILIES[op][:1]:
        requests = max(1, rows // MINI["verify_width"]) if op == "kda_verify" else rows
        case = make_case(op, MINI, family, requests, rows)
        judge(op, case, run(op, case), (family, rows))


@pytest.mark.parametrize("dims", [K3_SHARD_8, K3_SHARD_16], ids=["tp8", "tp16"])
@pytest.mark.parametrize("op", [op for op in OPS if op not in ("rms_norm", "all_reduce", "attn_res", "kda_verify")])
def test_a_kernel_stays_within_the_contract_at_k3s_shard_sizes(op: str, dims: dict[str, int]) -> None:
    few = {"experts_held": 17, "projection_size": 1000}
    case = make_case(op, {**dims, **few, "ranks": 2}, FAMILIES[op][0], 3, 0)
    judge(op, case, run(op, case), "K3")


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_keeps_the_exact_contracts(op: str) -> None:
    """Unowned bytes, poison, NaN rows, null rows, unwritten memory, strides, row order, the same bits twice."""
    for rows in (5, 16):
        case = make_case(op, MINI, FAMILIES[op][0], rows, 1)
        broken = broken_contracts(op, case, lambda inputs: run(op, inputs), placement=True)
        assert not any(broken.values()), (rows, broken)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("kda_step", "kda_verify", "mla_query")])
def test_a_replayed_graph_gives_the_bits_of_an_eager_call(op: str) -> None:
    from decode_impl.specialized.kernels import OPS

    case = {name: moved(x, "cuda") for name, x in make_case(op, MINI, FAMILIES[op][0], 8, 2).items()}
    eager = call_on_case(OPS, op, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call_on_case(OPS, op, case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call_on_case(OPS, op, case)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(captured[name], x) for name, x in eager.items())


def test_a_kernel_leaves_its_arrival_counters_at_zero() -> None:
    from decode_impl.specialized.kernels import common

    case = make_case("projection", {**MINI, "hidden_size": 2048}, "iid", 3, 0)
    assert torch.equal(run("projection", case)["y"], run("projection", case)["y"])
    torch.cuda.synchronize()
    assert not common.counters(torch.empty(1, device="cuda"), 1).any()


def test_state_pools_past_2_to_the_31_elements_are_addressed_in_64_bits() -> None:
    case = make_case("kda_step", MINI, "iid", 2, 0)
    small = run("kda_step", case)
    slots = PAST_INT32 // case["state"][0].numel() + 8
    big = {name: moved(x, "cuda") for name, x in case.items()}
    shift = torch.where(case["slots"] > 0, slots - case["state"].shape[0], 0)
    for name in ("conv_state", "state"):
        pool = torch.zeros(slots, *case[name].shape[1:], dtype=case[name].dtype, device="cuda")
        pool[-case[name].shape[0] :] = case[name].cuda()
        big[name] = pool
    big["slots"] = (case["slots"] + shift).cuda()
    from decode_impl.specialized.kernels import OPS

    got = call_on_case(OPS, "kda_step", big, in_place=True)
    assert torch.equal(got["y"].cpu(), small["y"])
    live = case["slots"][case["slots"] > 0]
    assert torch.equal(big["state"][-case["state"].shape[0] :][live.cuda()].cpu(), small["state"][live])


def test_latent_caches_past_2_to_the_31_elements_are_addressed_in_64_bits() -> None:
    case = make_case("mla_attend", MINI, "iid_fp8", 2, 0)
    wanted, pages = run("mla_attend", case)["latent"], case["cache"].shape[0]
    total = PAST_INT32 // case["cache"][0].numel() + pages
    cache = torch.zeros(total, *case["cache"].shape[1:], dtype=torch.uint8, device="cuda")
    cache[-pages:] = case["cache"].cuda()
    big = {name: moved(x, "cuda") for name, x in case.items()} | {"cache": cache}
    big["block_table"] = big["block_table"] + (total - pages)
    from decode_impl.specialized.kernels import OPS

    assert torch.equal(call_on_case(OPS, "mla_attend", big)["latent"].cpu(), wanted)


def decode(device: str, kv: str, paths: Paths | None = None) -> Tensor:
    """Teacher-forced logits of k3-mini, f32 [steps, requests, vocab]: five requests, twelve steps after a prefill."""
    checkpoint = load_checkpoint(EMBEDDED_MODEL)
    weights = shard_weights(checkpoint.config, checkpoint.tensors, 2, torch.device(device))
    deployment = Deployment(
        decode_backend="latency_specialized", kv_cache_dtype=kv, tensor_parallel=2, max_batch=8, max_context=64
    )
    runner = ModelRunner(weights, deployment, paths)
    tokens = torch.randint(0, 256, (5, 52), generator=torch.Generator().manual_seed(1)).tolist()
    owned = [(runner.states.allocate(), tuple(runner.latents.allocate() for _ in range(4))) for _ in tokens]
    runner.execute([Chunk(row[:40], 0, slot, pages) for row, (slot, pages) in zip(tokens, owned, strict=True)])
    steps = []
    for position in range(40, 52):
        result = runner.execute([Chunk([r[position]], position, *own) for r, own in zip(tokens, owned, strict=True)])
        assert result.path == SPECIALIZED
        steps.append(result.logits.cpu())
    return torch.stack(steps)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_k3_mini_decoded_by_the_kernels_gives_the_logits_of_the_cpu_up_to_rounding(kv: str) -> None:
    kernels, cpu = decode("cuda", kv), decode("cpu", kv)
    on_gpu = decode("cuda", kv, TABLES)
    # The emulation on the same GPU is the yardstick: another order of sums, and so now and then another expert.
    ours, yardstick = (_median_error(x, cpu) for x in (kernels, on_gpu))
    # BF16 roundings through eight layers, two dozen each; an E4M3 row may fall to the other side, once a MLA layer.
    floor = (16 * 24 * BF16.unit_roundoff**2 + (2 * E4M3.unit_roundoff**2 if kv == "fp8" else 0.0)) ** 0.5
    assert ours <= 2 * yardstick + floor


def _median_error(logits: Tensor, reference: Tensor) -> float:
    errors = [
        error_stats(a, b.double()).rmse_ratio
        for a, b in zip(logits.flatten(0, 1), reference.flatten(0, 1), strict=True)
    ]
    return sorted(errors)[len(errors) // 2]


def test_a_decode_by_the_kernels_gives_the_same_bits_twice() -> None:
    assert torch.equal(decode("cuda", "fp8"), decode("cuda", "fp8"))
