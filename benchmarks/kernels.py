"""Measure every kernel of the specialised path at K3's true shard sizes, on one GPU.

    python -m benchmarks.kernels OUT [--budget SECONDS]

Writes OUT/kernels.json and OUT/kernels.md. For tensor-parallel 8 and 16 and batch 1, 8 and 64: the kernel's median
time, the bytes that it has to move over the measured copy bandwidth (the least time the memory allows), and the
generic op beside it in two forms: as it is written (torch eager, FP32 products of widened weights), and with its
products through cuBLAS in BF16. Every call finds a cold L2. Calls are replayed from a CUDA graph where the op can be
captured; the generic ops that read a value on the host cannot, and carry their launches' time: the column says which.

The step estimate adds up the ops of 69 KDA and 24 MLA layers of one rank, without communication, head or embedding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_shapes import CONTEXT, HIDDEN, Q_RANK, SHARDS, TOP_K, arguments, case_of, heads_of
from decode_impl import generic
from decode_impl.generic import attn_res, kda, linear, mla, moe

BATCHES = (1, 8, 64)
FLUSH = 256 << 20
"""Bytes written between two calls: five times the L2 of an H200."""

LAYERS = {"kda": 69, "mla": 24}
_COMMON = ("attn_res", "output_mix", "moe_front", "route", "experts", "shared_expert", "moe_tail")
OPS_OF_A_LAYER = {
    "kda": ("projection", "kda_step", *_COMMON),
    "mla": ("projection_mla", "mla_query", "mla_attend", "mla_value", *_COMMON),
}
MEASURED = (
    "experts",
    "projection",
    "projection_mla",
    "moe_front",
    "moe_tail",
    "output_mix",
    "shared_expert",
    "kda_step",
)
MEASURED += ("attn_res", "route", "mla_query", "mla_attend", "mla_value", "kda_verify", "rms_norm", "all_reduce")

WITHOUT_PRODUCTS = ("experts", "mla_attend")
"""Generic ops whose products are their own: cuBLAS in their place changes nothing."""

READS_ON_HOST = ("kda_step", "kda_verify", "mla_query")
"""Other generic ops that read a value on the host, so that no graph can hold them."""


class Bench:
    """Times calls with a cold L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def median_us(self, call: Callable[[], Any], runs: int = 20, most_s: float = 0.6) -> float:
        """Median microseconds of `call`, each after a flush; fewer runs where `most_s` would be exceeded."""
        times: list[float] = []
        begun = time.monotonic()
        while len(times) < runs and (len(times) < 3 or time.monotonic() - begun < most_s):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        return statistics.median(times)

    def empty_graph_us(self) -> float:
        """What the clock shows for a graph of one tiny kernel: the floor of every figure."""
        x = torch.zeros(1, device="cuda")
        replay = captured(lambda: x.add_(1))
        return self.median_us(replay)

    def copy_bandwidth(self) -> float:
        """Bytes read and written by a large copy, per second."""
        source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.median_us(lambda: target.copy_(source)) * 1e-6)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of `call` from a CUDA graph, captured after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


@contextmanager
def cublas() -> Iterator[None]:
    """While it lasts the generic ops multiply in BF16 through cuBLAS instead of in FP32 on widened weights."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight).float()

    def projection(*, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    replaced = [
        (m, n, getattr(m, n))
        for m in (linear, moe, attn_res, kda, mla)
        for n in ("product", "projection")
        if hasattr(m, n)
    ]
    try:
        for module, name, _ in replaced:
            setattr(module, name, product if name == "product" else projection)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def case_for(op: str, ranks: int, rows: int, seed: int = 0) -> dict[str, Any]:
    """The case of a measured op; `projection_mla` is MLA's input projection."""
    if op != "projection_mla":
        return case_of(op, ranks, rows, "cuda", seed)
    case = case_of("projection", ranks, rows, "cuda", seed)
    return {**case, "weight": case["weight"][: Q_RANK + 576 + heads_of(ranks) * 128]}


def moved_bytes(op: str, case: Mapping[str, Any]) -> int:
    """Bytes that the op has to read and write once: owned slots, seen keys and chosen experts only."""
    sizes = {k: v.numel() * v.element_size() for k, v in case.items() if isinstance(v, Tensor)}
    if op in ("kda_step", "kda_verify"):
        per_slot = sum(case[p][0].numel() * case[p].element_size() for p in ("state", "conv_state"))
        reads, writes = (
            (len(case["slots"]),) * 2 if op == "kda_step" else (len(case["sources"]), case["targets"].numel())
        )
        sizes |= {"state": per_slot * (reads + writes), "conv_state": 0}
    elif op == "mla_attend":
        sizes["cache"] = len(case["lengths"]) * CONTEXT * case["cache"].shape[-1] * case["cache"].element_size()
    elif op == "mla_query":
        sizes["cache"] = len(case["positions"]) * case["cache"].shape[-1]
    elif op == "experts":
        share = len(case["ids"].unique()) / case["w13_packed"].shape[0]
        sizes |= {k: int(v * share) for k, v in sizes.items() if k.startswith(("w13", "w2"))}
    outputs = {"projection": "weight", "projection_mla": "weight", "output_mix": "weight.0", "moe_tail": "up_weight"}
    rows = next(v.shape[0] for k, v in case.items() if isinstance(v, Tensor))
    written = case[outputs[op]].shape[0] if op in outputs else HIDDEN
    return sum(sizes.values()) + rows * written * 2


def measure(bench: Bench, op: str, ranks: int, rows: int, bandwidth: float, baselines: bool) -> dict[str, Any]:
    """One row of the table; an arm that fails carries its error instead of a time."""
    from decode_impl.specialized.kernels import OPS

    name = "projection" if op == "projection_mla" else op
    case = case_for(op, ranks, rows)
    inputs = arguments(case)
    size = moved_bytes(op, case)
    row: dict[str, Any] = {"op": op, "ranks": ranks, "rows": rows, "bytes": size, "least_us": size / bandwidth * 1e6}
    row |= _arm(bench, "kernel", lambda: OPS[name](**inputs))
    if baselines:
        row |= _arm(bench, "generic", lambda: generic.OPS[name](**inputs), eager=True)
        if name in WITHOUT_PRODUCTS:
            row |= {f"cublas_{k}": row[f"generic_{k}"] for k in ("us", "graph", "error") if f"generic_{k}" in row}
        else:
            with cublas():
                row |= _arm(bench, "cublas", lambda: generic.OPS[name](**inputs), eager=name in READS_ON_HOST)
    return row


def _arm(bench: Bench, label: str, call: Callable[[], Any], eager: bool = False) -> dict[str, Any]:
    """Time of one arm, and whether it came from a graph. `eager`: the op reads a value on the host."""
    try:
        call()
        torch.cuda.synchronize()
        return {f"{label}_us": bench.median_us(call if eager else captured(call)), f"{label}_graph": not eager}
    except Exception as error:  # a failing op is reported, and the others still run
        torch.cuda.synchronize()
        return {f"{label}_error": f"{type(error).__name__}: {error}"[:300]}


def warm_cache() -> None:
    """Compile all kernels at once, in a process an op: a launch then finds its binary in Triton's cache."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    names = sorted({"projection" if op == "projection_mla" else op for op in MEASURED})
    command = [sys.executable, "-m", "benchmarks.kernel_resources"]
    running = [
        subprocess.Popen([*command, op], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for op in names
    ]
    for op, process in zip(names, running, strict=True):
        output, _ = process.communicate(timeout=90)
        if process.returncode:
            print(f"{op}: compiling ahead failed; it compiles when it runs\n{output[-600:]}", flush=True)


def step_estimates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Microseconds of a whole step, by shard and batch, where every op of both layer kinds has a time."""
    estimates = []
    for ranks in SHARDS:
        for batch in BATCHES:
            found = {r["op"]: r for r in rows if r["ranks"] == ranks and r["rows"] == batch}
            total: dict[str, Any] = {"ranks": ranks, "rows": batch}
            for key in ("kernel_us", "cublas_us", "generic_us", "least_us"):
                parts = [(LAYERS[k], found.get(op, {}).get(key)) for k, ops in OPS_OF_A_LAYER.items() for op in ops]
                if all(value is not None for _, value in parts):
                    total[key] = sum(count * value for count, value in parts if value is not None)
            estimates.append(total)
    return estimates


def layer_chains(bench: Bench, ranks: int, rows: int, bandwidth: float, count: int = 4) -> list[dict[str, Any]]:
    """Time of one layer of either kind, from a graph of `count` of them with weights of their own: none is in L2.

    The ops run in the order of a step, each on its own inputs: what is missing against a step is only its data flow.
    """
    from decode_impl.specialized.kernels import OPS

    chains = []
    for kind, ops in OPS_OF_A_LAYER.items():
        row: dict[str, Any] = {"kind": kind, "ranks": ranks, "rows": rows}
        try:
            cases = [(op, case_for(op, ranks, rows, seed)) for seed in range(count) for op in ops]
            calls = [("projection" if op == "projection_mla" else op, arguments(case)) for op, case in cases]

            def layers(calls: list[tuple[str, dict[str, Any]]] = calls) -> None:
                for name, inputs in calls:
                    OPS[name](**inputs)

            row["least_us"] = sum(moved_bytes(op, case) for op, case in cases) / count / bandwidth * 1e6
            row["kernel_us"] = bench.median_us(captured(layers)) / count
        except Exception as error:
            row["kernel_error"] = f"{type(error).__name__}: {error}"[:300]
        chains.append(row)
        cases = calls = []
        gc.collect()
        torch.cuda.empty_cache()
    return chains


def _figure(row: Mapping[str, Any], label: str) -> str:
    if f"{label}_error" in row:
        return "failed"
    if f"{label}_us" not in row:
        return "-"
    return f"{row[f'{label}_us']:.1f}" + ("" if row.get(f"{label}_graph", True) else " (eager)")


def _ratio(row: Mapping[str, Any], label: str, over: str = "kernel_us") -> str:
    return f"{row[label] / row[over]:.2f}" if label in row and over in row else "-"


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"# Kernels at K3's shard sizes: {report['device']}",
        "",
        f"torch {report['torch']}, Triton {report['triton']}, copy bandwidth {report['copy_tb_s']:.2f} TB/s, "
        f"empty graph {report['empty_graph_us']:.1f} us (part of every figure from a graph), "
        f"{report['seconds']:.0f} s",
        "",
        "| op | TP | rows | MB | least us | kernel us | of limit | cuBLAS us | ratio | generic us | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = (row["op"], row["ranks"], row["rows"], f"{row['bytes'] / 1e6:.2f}", f"{row['least_us']:.1f}")
        figures = (_figure(row, "kernel"), _ratio(row, "least_us"), _figure(row, "cublas"), _ratio(row, "cublas_us"))
        lines.append(
            f"| {' | '.join(map(str, (*cells, *figures, _figure(row, 'generic'), _ratio(row, 'generic_us'))))} |"
        )
    lines += [
        "",
        "| step of | TP | rows | least us | kernels us | of limit | cuBLAS ratio | generic ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["steps"]:
        figures = [f"{row[k]:.0f}" if k in row else "-" for k in ("least_us", "kernel_us")]
        ratios = [_ratio(row, k) for k in ("least_us", "cublas_us", "generic_us")]
        lines.append(f"| 93 layers | {row['ranks']} | {row['rows']} | {' | '.join((*figures, *ratios))} |")
    lines += [
        "",
        "| layer, four in one graph | TP | rows | least us | kernels us | of limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["layers"]:
        figures = [f"{row[k]:.1f}" if k in row else "failed" for k in ("least_us", "kernel_us")]
        cells = (row["kind"], str(row["ranks"]), str(row["rows"]), *figures, _ratio(row, "least_us"))
        lines.append(f"| {' | '.join(cells)} |")
    failed = [*report["rows"], *({"op": f"layer {r['kind']}", **r} for r in report["layers"])]
    errors = [
        f"- {r['op']} TP{r['ranks']} {r['rows']} rows, {k}: {v}"
        for r in failed
        for k, v in r.items()
        if k.endswith("_error")
    ]
    return "\n".join([*lines, *(["", "Failed:", "", *errors] if errors else []), ""])


def main() -> None:
    """Measure until done or until the budget is spent; what was measured is written after every op."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=115.0, help="seconds")
    parser.add_argument("--layers-only", action="store_true", help="chains of whole layers, no single ops")
    parser.add_argument("--no-baselines", action="store_true", help="kernels only")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; this measures one")
    import triton

    begun = time.monotonic()
    chosen.out.mkdir(parents=True, exist_ok=True)
    warm_cache()
    bench = Bench()
    with torch.inference_mode():
        bandwidth = bench.copy_bandwidth()
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_tb_s": bandwidth / 1e12,
            "empty_graph_us": bench.empty_graph_us(),
            "compile_s": time.monotonic() - begun,
            "context": CONTEXT,
            "top_k": TOP_K,
            "rows": [],
            "layers": [],
        }
        for ranks in sorted(SHARDS, reverse=True):
            for rows in BATCHES:
                for op in () if chosen.layers_only else MEASURED:
                    if time.monotonic() - begun > chosen.budget:
                        break
                    try:
                        row = measure(bench, op, ranks, rows, bandwidth, not chosen.no_baselines)
                    except Exception as error:  # an input that does not fit, say
                        row = {"op": op, "ranks": ranks, "rows": rows, "bytes": 0, "least_us": 0.0}
                        row["kernel_error"] = f"{type(error).__name__}: {error}"[:300]
                    report["rows"].append(row)
                    gc.collect()
                    torch.cuda.empty_cache()
                if time.monotonic() - begun < chosen.budget:
                    report["layers"] += layer_chains(bench, ranks, rows, bandwidth)
                report |= {"steps": step_estimates(report["rows"]), "seconds": time.monotonic() - begun}
                (chosen.out / "kernels.json").write_text(json.dumps(report, indent=1))
                (chosen.out / "kernels.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
