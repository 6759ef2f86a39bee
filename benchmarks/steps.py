"""Measure whole specialised decode steps at K3's true shard size, on one GPU: all layers, random weights, CUDA graphs.

    python -m benchmarks.steps OUT [--ranks 16] [--layers N]

One rank's share of the model without communication: what its kernels and launches cost. For every batch bin, and for a
verify step of 7 drafts: the median time of a replay, the bytes that it has to read (weights once, the experts that were
chosen, seen keys, states) over the measured copy bandwidth, and tokens a second. The experts that a step reads are
counted in an eager run of it. Launches per layer are counted from a profiler's trace. Weights beyond L2 make every
replay a cold one. Writes OUT/steps.json and OUT/steps.md after every figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Bench
from decode_impl.batch import Batch
from decode_impl.caches import LatentCache, StateCache
from decode_impl.config import ModelConfig
from decode_impl.model import Step, forward
from decode_impl.ops import OpTable
from decode_impl.presets import k3_shard
from decode_impl.specialized.contract import BATCH_BINS
from decode_impl.specialized.graphs import StepGraphs, cuda_capture, null_batch
from validation.bench.traffic import step_bytes, weight_bytes
from validation.bench.weights import random_weights

PAGE, CONTEXT = 64, 4096
DRAFTS = 7
SYNTHETIC_ACCEPTANCE = 6
"""Tokens that a verify step commits in the figure for speculation: assumed, not measured."""


class Model:
    """Random weights with caches for 64 requests of `CONTEXT` tokens, FP8 latents, FP32 states."""

    def __init__(self, config: ModelConfig, ops: OpTable, device: torch.device, columns: int, requests: int) -> None:
        self.weights = random_weights(config, device)
        self.ops, self.device, self.requests = ops, device, requests
        self.pages = -(-(CONTEXT + DRAFTS + 1) // PAGE)
        self.latents = LatentCache(self.weights, "fp8", requests * self.pages, PAGE)
        self.states = StateCache(self.weights, "f32", requests, columns)
        for layer in self.latents.layers.values():
            layer.random_(0, 0x70)

    def forward(self, batch: Batch) -> Step:
        return forward(self.weights, self.ops, batch, self.latents, self.states)

    def batch(self, requests: int, width: int) -> Batch:
        """A step of `requests` requests whose contexts are full, filled with tensors on the device."""
        rows, columns = requests * width, self.states.columns
        batch = null_batch(rows, width, PAGE, self.pages)
        request = torch.arange(requests).repeat_interleave(width)
        place = CONTEXT + torch.arange(width).repeat(requests)
        table = 1 + request[:, None] * self.pages + torch.arange(self.pages)
        slots = columns * (1 + torch.arange(requests))
        batch = replace(
            batch,
            tokens=torch.randint(0, self.weights.config.vocab_size, (rows,)),
            positions=table[torch.arange(rows), place // PAGE] * PAGE + place % PAGE,
            indices=place,
            lengths=place + 1,
            block_table=table,
            logit_rows=torch.arange(rows),
        )
        if width == 1:
            return replace(batch, slots=slots).to(self.device)
        verify = replace(batch.verify[0], sources=slots, targets=slots[:, None] + torch.arange(width))
        return replace(batch, verify=[verify]).to(self.device)


def chosen_experts(model: Model, batch: Batch) -> list[int]:
    """Different experts that an eager run of a step reads, by layer."""
    counts: list[int] = []

    def route(**arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = model.ops["route"](**arguments)
        counts.append(len(ids.unique()))
        return ids, weights

    forward(model.weights, {**model.ops, "route": route}, batch, model.latents, model.states)
    return counts


def measure(model: Model, bench: Bench, bandwidth: float, requests: int, width: int) -> dict[str, Any]:
    """One shape: replayed from a graph, and eagerly."""
    batch = model.batch(requests, width)
    experts = chosen_experts(model, batch)
    graphs = StepGraphs(
        model.forward, cuda_capture(model.device), [(requests * width, width)], PAGE, model.pages, model.device
    )
    graphs.run(batch)
    replay = bench.median_us(lambda: graphs.run(batch), runs=30, most_s=1.0)
    eager = bench.median_us(lambda: model.forward(batch), runs=5, most_s=1.0)
    size = step_bytes(model.weights, experts, requests, width, CONTEXT)
    return {
        "requests": requests,
        "width": width,
        "step_us": replay,
        "eager_us": eager,
        "bytes": size,
        "least_us": size / bandwidth * 1e6,
        "experts": sum(experts) / max(1, len(experts)),
    }


def launches(config: ModelConfig, ops: OpTable, device: torch.device) -> dict[str, int]:
    """Kernel launches of one KDA and one MLA layer with a latent MoE: what one more such layer adds to a trace."""

    def count(full: tuple[int, ...], layers: int) -> int:
        small = replace(config, num_hidden_layers=layers, full_attention_layers=full)
        model = Model(small, ops, device, columns=1, requests=1)
        batch = model.batch(1, 1)
        model.forward(batch)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            model.forward(batch)
            torch.cuda.synchronize()
        return sum(event.count for event in trace.key_averages() if event.device_time_total > 0)

    two = count((), 2)
    return {"kda": count((), 3) - two, "mla": count((2,), 3) - two}


def shapes_to_measure() -> Iterator[tuple[int, int]]:
    """Requests and width of every step: all bins without drafts, and as many requests with 7 drafts as fit."""
    yield from ((rows, 1) for rows in BATCH_BINS)
    yield from ((requests, 1 + DRAFTS) for requests in (1, 2, 4, 8))


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"{report['device']}, torch {report['torch']}, Triton {report['triton']}; {report['model']}, "
        f"{report['layers']} layers, {report['weights_gb']:.0f} GB of weights, context {CONTEXT}, FP8 latents; "
        f"copy bandwidth {report['copy_tb_s']:.2f} TB/s",
        "",
        f"Launches of one layer, from a trace: {report.get('launches', 'not counted')}",
        "",
        "| requests | rows each | experts read a layer | GB | least us | step us | of limit | eager us | steps/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["steps"]:
        cells = (
            f"{row['requests']} | {row['width']} | {row['experts']:.0f} | {row['bytes'] / 1e9:.2f} | "
            f"{row['least_us']:.0f} | {row['step_us']:.0f} | {row['least_us'] / row['step_us']:.2f} | "
            f"{row['eager_us']:.0f} | {1e6 / row['step_us']:.0f}"
        )
        lines.append(f"| {cells} |")
    times = {(row["requests"], row["width"]): row["step_us"] for row in report["steps"]}
    for requests in (1, 2, 4, 8):
        plain, verify = times.get((requests, 1)), times.get((requests, 1 + DRAFTS))
        if plain and verify:
            ratio = SYNTHETIC_ACCEPTANCE * plain / verify
            lines += [
                "",
                f"{requests} requests with {DRAFTS} drafts, SYNTHETIC acceptance {SYNTHETIC_ACCEPTANCE}, drafter not "
                f"counted: {ratio:.2f} x the output of steps without drafts.",
            ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure every shape; what was measured is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=16, help="tensor parallelism whose share is measured")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; this measures one")
    import triton

    from decode_impl.specialized.kernels import OPS

    config, device = k3_shard(chosen.ranks), torch.device("cuda")
    if chosen.layers:
        full = tuple(i for i in config.full_attention_layers if i < chosen.layers)
        config = replace(config, num_hidden_layers=chosen.layers, full_attention_layers=full)
    chosen.out.mkdir(parents=True, exist_ok=True)
    begun, bench = time.monotonic(), Bench()
    with torch.inference_mode():
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "model": config.name,
            "layers": config.num_hidden_layers,
            "copy_tb_s": bench.copy_bandwidth() / 1e12,
            "steps": [],
        }
        report["launches"] = launches(config, OPS, device)
        torch.cuda.empty_cache()
        for columns in (1, 1 + DRAFTS):
            model = Model(config, OPS, device, columns, BATCH_BINS[-1] // columns)
            report["weights_gb"] = weight_bytes(model.weights) / 1e9
            for requests, width in shapes_to_measure():
                if width == columns:
                    report["steps"].append(measure(model, bench, report["copy_tb_s"] * 1e12, requests, width))
                    report["seconds"] = time.monotonic() - begun
                    (chosen.out / "steps.json").write_text(json.dumps(report, indent=2))
                    (chosen.out / "steps.md").write_text(markdown(report))
            del model
            torch.cuda.empty_cache()
    print(markdown(report))


if __name__ == "__main__":
    main()
