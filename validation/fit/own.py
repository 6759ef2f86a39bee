"""This project's specialised path: its own refusals and routing, asked through the target's door."""

from __future__ import annotations

from collections.abc import Mapping

from validation.fit.conditions import Check, Kind, Unmet, unmet
from validation.fit.deployment import DeploymentFile
from validation.fit.hardware import GPUS
from validation.targets import own_path

MEASURED: Mapping[int, tuple[float, float]] = {
    0: (1.262, 1.125),
    3: (1.181, 1.116),
    5: (1.169, 1.115),
    7: (1.124, 1.090),
}
"""Drafts -> how many times as fast a step of the specialised path is as one of the generic, at most and at least.

Of all batches measured: docs/measurements/2026-11-30-bench.md. The most is at batch 1 each time.
"""

MEASURED_ON = "one H200, a TP16 share of K3"


def measured(drafts: int) -> tuple[float, float]:
    """The most and the least of our own figures for steps of so many drafts, or of the next fewer measured."""
    return MEASURED[max(known for known in MEASURED if known <= drafts)]


def own(given: DeploymentFile) -> list[Unmet]:
    """Unmet conditions: what the engine refuses, and what it has no option for."""
    options = {
        "kv_cache_dtype": given.cache.kv,
        "state_dtype": {"fp32": "f32", "bf16": "bf16"}[given.cache.recurrent_state],
        "tensor_parallel": given.parallel.tensor,
        "max_batch": given.max_batch,
        "max_context": given.max_context,
        "drafts": given.drafts,
    }
    refused = [Unmet(reason, Kind.REFUSED) for reason in own_path.refusals(given.model, options)]
    return refused + unmet(Kind.REFUSED, _no_option(given))


def _no_option(given: DeploymentFile) -> list[Check]:
    gpu, ranks, speculation = GPUS[given.hardware.gpu], given.parallel, given.speculation
    least = own_path.KERNEL_CAPABILITY
    devices = ranks.tensor * ranks.pipeline
    return [
        (
            gpu.capability is not None and gpu.capability >= least,
            f"GPU is {given.hardware.gpu}, the fused kernels need CUDA capability {least[0]}.{least[1]} or more",
        ),
        (devices <= own_path.DEVICES, f"{devices} GPUs a replica, all ranks run on {own_path.DEVICES} device"),
        (
            ranks.decode_context in (1, ranks.tensor),
            f"decode context parallelism is {ranks.decode_context}, 1 or {ranks.tensor} (all tensor ranks) is needed",
        ),
        (ranks.pipeline == 1, f"pipeline parallelism is {ranks.pipeline}, there is none"),
        (not ranks.expert, "expert parallelism is on, there is none"),
        (given.cache.conv_state == "bf16", f"conv state is {given.cache.conv_state}, it is always bf16"),
        (not given.engine.lora, "LoRA is on, there is none"),
        (
            speculation is None or speculation.method == "dspark",
            f"speculation is {speculation.method if speculation else 'none'}, only dspark or none is supported",
        ),
    ]


def own_fallback(given: DeploymentFile, requests: int) -> str | None:
    """Why a decode step of so many requests runs generic; None where it is specialised."""
    return own_path.fallback(requests, given.drafts)
