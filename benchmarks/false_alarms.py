"""How often a clean candidate is called wrong: a premerge run in small on many seeds, none of which may turn red.

A small but honest part of the premerge profile is judged once per seed: every op at one batch bin with families in
turn, over shapes at another bin, and a probe (the grid of small attentions among them); parity of one cell, of another
with drafts or with contexts over two ranks in turn, and two of its schedules of requests; long answers. Every third
seed asks sampler, acceptance, containment, all drafts with all counts accepted, the cases by hand and a little
fuzzing. Any seven seeds see all bins and schedules, any eight all cells in both cache formats and all probes, any dozen
all families. `--gates` leaves parts out. Results go to one JSON line per seed, so a run that is stopped goes on where
it was. With 0 red of N seeds the rate of false alarms is at most 1 - 0.05^(1/N) at 95 % confidence, which is exact
(Clopper and Pearson).

    python -m benchmarks.false_alarms [--seeds 200] [--first 0] [--workers 2] [--out runs/false_alarms.jsonl]
        [--gates numerics parity schedules fuzz stability]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch

from validation.gates.base import Context
from validation.gates.numerics.probes import PROBES
from validation.gates.parity.schedules import SCENARIOS
from validation.gates.registry import load_gate
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget

ROWS = (1, 2, 4, 8, 16, 32, 64)
RED = {"FAIL", "ERROR"}
PARTS = ("numerics", "parity", "schedules", "fuzz", "stability")
"""What a seed can be judged on; `schedules` and `fuzz` are the parity gate's, judged with its cells."""

CELL: dict[str, Any] = {"tensor_parallel": [1], "batches": [8]}
OTHERS: tuple[dict[str, Any], ...] = (
    {**CELL, "drafts": 7},
    {**CELL, "tensor_parallel": [2], "context_parallel": 2, "drafts": 3},
    {**CELL, "tensor_parallel": [2], "context_parallel": 2},
    {**CELL, "drafts": 4},
)
"""Cells that the parity gate judges in turn, besides one of whole contexts without drafts."""

FUZZED_EVERY = 3
"""Of so many seeds one asks what the parity gate asks where it fuzzes."""

FUZZ: dict[str, Any] = {"fuzz_seeds": 1, "fuzz_steps": 40}
STABILITY: dict[str, Any] = {
    "chains": 2,
    "chain_tokens": 40,
    "texts": 3,
    "text_tokens": 16,
    "drift_sequences": 4,
    "drift_tokens": 96,
    "batch": 4,
    "drafts": 7,
    "kv_cache_dtype": "fp8",
}


def numerics_settings(seed: int) -> dict[str, Any]:
    """Every op at one row count, with a few families, and over shapes at another."""
    return {
        "rows": [ROWS[seed % len(ROWS)]],
        "sequence_rows": [1 + 8 * (seed % 5)],
        "verify_rows": [1 + seed % 3],
        "verify_widths": [2 + seed % 7],
        "shard_rows": [1],
        "shards": [("narrow_8", "narrow_16")[seed // 10 % 2]] if seed % 10 == 0 else [],
        "shape_rows": [ROWS[(seed + 3) % len(ROWS)]],
        "seeds": 1,
        "families": "in turn",
        "probes": [tuple(PROBES)[seed % len(PROBES)]],
    }


def parity_settings(seed: int, parts: Collection[str]) -> dict[str, Any]:
    """One cell and another in turn, their cache format in turn, two of the schedules and fuzzing where asked for."""
    names = tuple(SCENARIOS)
    cache_dtype = ("fp8", "bf16")[seed // len(OTHERS) % 2]
    fuzzed = "fuzz" in parts and seed % FUZZED_EVERY == 0
    schedules = [names[(2 * seed + i) % len(names)] for i in (0, 1)]
    return {
        "prompt_length": 24,
        "decode_length": 8,
        "min_sequences": 8,
        "most_sequences": 24,
        "schedules": schedules if "schedules" in parts else [],
        "cells": [{"kv_cache_dtype": cache_dtype, **cell} for cell in (CELL, OTHERS[seed % len(OTHERS)])],
        **(FUZZ if fuzzed else {}),
    }


def settings_of(seed: int, parts: Collection[str]) -> dict[str, dict[str, Any]]:
    """Settings by gate."""
    settings = {"numerics": numerics_settings(seed)} if "numerics" in parts else {}
    if {"parity", "schedules", "fuzz"} & set(parts):
        settings["parity"] = parity_settings(seed, parts)
    return settings | ({"stability": STABILITY} if "stability" in parts else {})


@cache
def target() -> BuiltinTarget:
    """The embedded model, once per process."""
    torch.set_num_threads(1)
    return BuiltinTarget.load(None)


def judge(seed: int, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Verdicts, findings and core seconds of every gate for one seed."""
    start = time.process_time()
    result: dict[str, Any] = {"seed": seed, "parts": sorted(parts), "verdicts": {}, "findings": [], "cases": 0}
    for name, settings in settings_of(seed, parts).items():
        gate = load_gate(name)
        if reason := gate.settings_error(settings):
            raise ValueError(f"settings of {name}: {reason}")
        candidate = ArmConfig("candidate", decode_backend="latency_specialized", kv_cache_dtype="fp8")
        context = Context(target(), ArmConfig("baseline", kv_cache_dtype="fp8"), candidate, seed, settings)
        judged = gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)
        result["verdicts"][name] = str(judged.verdict)
        result["cases"] += judged.metrics.get("cases", 0) if name == "numerics" else 0
        result["findings"] += [finding.message for finding in judged.findings]
    return {**result, "seconds": round(time.process_time() - start, 1)}


def known(out: Path) -> dict[int, dict[str, Any]]:
    """Results so far by seed; a line that a stopped run left unfinished is ignored."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {entry["seed"]: entry for entry in _entries(lines)}


def _entries(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def largest_rate(runs: int) -> float:
    """The rate of red runs at which none of `runs` is red with a probability of 5 %: the exact upper bound."""
    return float(1 - 0.05 ** (1 / runs))


def statement(results: Mapping[int, dict[str, Any]]) -> str:
    """What the results show, with its bound. A run without a decision is no false alarm, and is counted apart."""
    said = {seed: set(r["verdicts"].values()) for seed, r in results.items()}
    red = sorted(seed for seed, verdicts in said.items() if verdicts & RED)
    open_ = sum(bool(verdicts - RED - {"PASS"}) for seed, verdicts in said.items() if seed not in red)
    without = f"; {open_} of them without a decision" if open_ else ""
    if red:
        share = len(red) / len(results)
        return f"{len(red)} of {len(results)} clean runs red ({share:.1%}): seeds {', '.join(map(str, red))}{without}"
    cases = sum(r["cases"] for r in results.values())
    seconds = sum(r["seconds"] for r in results.values()) / len(results)
    return (
        f"0 of {len(results)} clean runs red{without} ({cases} numerics cases, {seconds:.0f} core seconds a run); "
        f"the rate of false alarms is at most {largest_rate(len(results)):.2%} of such runs at 95 % confidence"
    )


def main() -> int:
    """Judge what is missing, print each seed as it comes and the statement at the end; 1 where a run was red."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/false_alarms.jsonl"))
    parser.add_argument("--gates", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if options.seeds < 1 or options.workers < 1:
        parser.error("--seeds and --workers start at 1")
    wanted, parts = range(options.first, options.first + options.seeds), sorted(options.gates)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {s: r for s, r in known(options.out).items() if s in wanted and r.get("parts") == parts}
    # A forked child of a torch that was built for CUDA may wait for ever.
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    with pool, options.out.open("a", encoding="utf-8") as file:
        missing = [seed for seed in wanted if seed not in results]
        for done in as_completed([pool.submit(judge, seed, parts) for seed in missing]):
            entry = done.result()
            results[entry["seed"]] = entry
            file.write(json.dumps(entry) + "\n")
            file.flush()
            print(f"seed {entry['seed']}: {entry['verdicts']}, {entry['seconds']} s", *entry["findings"], sep="\n  ")
    print(statement(results))
    return int(any(set(r["verdicts"].values()) & RED for r in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
