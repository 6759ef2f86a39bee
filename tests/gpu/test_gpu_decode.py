"""Both paths of the decode on a GPU, against the same steps on a CPU and the fp64 oracles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_impl import generic
from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment
from decode_impl.ops import OpTable, call_on_case
from decode_impl.presets import K3_MINI
from decode_impl.random_weights import random_checkpoint
from decode_impl.runner import ModelRunner
from decode_impl.specialized import emulation
from decode_impl.weights import shard_weights
from numerics.bounds import BF16, E4M3, F32
from numerics.families import FAMILIES, MINI, make_case
from numerics.metrics import error_stats
from numerics.oracles import ORACLES, comparable, written

DENSE = replace(K3_MINI, name="dense", num_experts=4, experts_per_token=4)
"""Every token takes every expert, so that no rounding can turn into another choice of experts."""

ROUNDINGS = 16 * 24
"""BF16 roundings through eight layers (two dozen each way through attention and MLP), added in quadrature."""


def logits(device: str, backend: str, kv: str, context: int) -> Tensor:
    """Logits of twelve decode steps of five requests after a prefill, contexts on `context` of two ranks."""
    weights = shard_weights(DENSE, random_checkpoint(DENSE, 3).tensors, 2, torch.device(device))
    deployment = Deployment(backend, kv, tensor_parallel=2, context_parallel=context, max_batch=8)
    runner = ModelRunner(weights, deployment)
    tokens = torch.randint(0, 256, (5, 52), generator=torch.Generator().manual_seed(1)).tolist()
    owned = [(runner.states.allocate(), tuple(runner.latents.allocate() for _ in range(4))) for _ in tokens]
    runner.execute([Chunk(row[:40], 0, slot, pages) for row, (slot, pages) in zip(tokens, owned, strict=True)])
    steps = []
    for position in range(40, 52):
        chunks = [Chunk([row[position]], position, *own) for row, own in zip(tokens, owned, strict=True)]
        steps.append(runner.execute(chunks).logits.cpu())
    return torch.stack(steps)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_decode_on_the_gpu_gives_the_logits_of_the_cpu_up_to_rounding(backend: str, kv: str, context: int) -> None:
    on_gpu, on_cpu = logits("cuda", backend, kv, context), logits("cpu", backend, kv, context)
    # An E4M3 row that falls on the other side of a rounding differs by a whole ULP; one such step per MLA layer.
    format_noise = 2 * E4M3.unit_roundoff**2 if kv == "fp8" else 0.0
    bound = (ROUNDINGS * BF16.unit_roundoff**2 + format_noise) ** 0.5
    assert error_stats(on_gpu, on_cpu.double()).rmse_ratio < bound


@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_every_op_on_the_gpu_is_as_accurate_as_on_the_cpu(op: str) -> None:
    for table in (generic.OPS, emulation.OPS):
        for family in FAMILIES[op] if op in table else ():
            _compare(table, op, make_case(op, MINI, family, 8, 0))


def _compare(table: OpTable, op: str, case: dict[str, object]) -> None:
    reference = ORACLES[op](case)
    on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in case.items()}
    gpu = comparable(op, case, {k: v.cpu() for k, v in call_on_case(table, op, on_gpu).items()})
    cpu = comparable(op, case, call_on_case(table, op, case))
    for name, exact in reference.items():
        rows = written(op, case).get(name, slice(None))
        if exact.dtype == torch.int64 or not exact[rows].numel():
            continue
        # Twice the CPU's own error, and a floor of one FP32 rounding per addition for outputs that are not rounded.
        floor = 512 * F32.unit_roundoff * float(exact[rows].abs().max())
        errors = [error_stats(values[name][rows], exact[rows]) for values in (gpu, cpu)]
        assert errors[0].rmse <= 2 * errors[1].rmse + floor, (op, name)
