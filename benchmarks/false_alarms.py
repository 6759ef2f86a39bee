"""How often a clean candidate is called wrong: numerics and parity on many seeds, none of which may turn red.

A small but honest profile (every op, every input family in turn, batches of 1 to 64 rows, verify steps, captured
activations; parity with both cache formats) is judged once per seed. Results go to one JSON line per seed, so a run
that is stopped goes on where it was. With 0 red of N seeds the rate of false alarms is below 3/N at 95 % confidence.

    python benchmarks/false_alarms.py [--seeds 200] [--first 0] [--workers 2] [--out runs/false_alarms.jsonl]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from validation.gates.base import Context
from validation.gates.registry import load_gate
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget

ROWS = (1, 2, 4, 8, 16, 32, 64)
PARITY: dict[str, Any] = {
    "prompt_length": 24,
    "decode_length": 8,
    "min_sequences": 8,
    "schedules": [],
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [8]}],
}


def numerics_settings(seed: int) -> dict[str, Any]:
    """Every op at one row count, with two families: any seven seeds cover all batch bins, any dozen all families."""
    return {
        "rows": [ROWS[seed % len(ROWS)]],
        "sequence_rows": [1 + 8 * (seed % 5)],
        "verify_rows": [1 + seed % 3],
        "verify_widths": [2 + seed % 7],
        "shard_rows": [1],
        "shards": [("narrow_8", "narrow_16")[seed // 10 % 2]] if seed % 10 == 0 else [],
        "seeds": 1,
        "families": "in turn",
        "probes": [("cast", "coverage", "limits", "drift", "captured")[seed % 5]] if seed % 2 else [],
    }


@cache
def target() -> BuiltinTarget:
    """The embedded model, once per process."""
    torch.set_num_threads(1)
    return BuiltinTarget.load(None)


def judge(seed: int) -> dict[str, Any]:
    """Verdicts and findings of both gates for one seed."""
    start, result = time.perf_counter(), {"seed": seed, "verdicts": {}, "findings": [], "cases": 0}
    for name, settings in (("numerics", numerics_settings(seed)), ("parity", PARITY)):
        gate = load_gate(name)
        if reason := gate.settings_error(settings):
            raise ValueError(f"settings of {name}: {reason}")
        candidate = ArmConfig("candidate", decode_backend="latency_specialized", kv_cache_dtype="fp8")
        context = Context(target(), ArmConfig("baseline", kv_cache_dtype="fp8"), candidate, seed, settings)
        judged = gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)
        result["verdicts"][name] = str(judged.verdict)
        result["cases"] += judged.metrics.get("cases", 0)
        result["findings"] += [finding.message for finding in judged.findings]
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


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


def statement(results: Mapping[int, dict[str, Any]]) -> str:
    """What the results show, with its bound."""
    red = sorted(seed for seed, r in results.items() if set(r["verdicts"].values()) != {"PASS"})
    if red:
        share = len(red) / len(results)
        return f"{len(red)} of {len(results)} clean runs not green ({share:.1%}): seeds {', '.join(map(str, red))}"
    cases = sum(r["cases"] for r in results.values())
    return (
        f"0 of {len(results)} clean runs red ({cases} numerics cases in all); the rate of false alarms is below "
        f"{3 / len(results):.2%} of such runs at 95 % confidence"
    )


def main() -> int:
    """Judge what is missing, print each seed as it comes and the statement at the end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/false_alarms.jsonl"))
    options = parser.parse_args()
    if options.seeds < 1 or options.workers < 1:
        parser.error("--seeds and --workers start at 1")
    wanted = range(options.first, options.first + options.seeds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {seed: r for seed, r in known(options.out).items() if seed in wanted}
    with ProcessPoolExecutor(options.workers) as pool, options.out.open("a", encoding="utf-8") as file:
        for entry in pool.map(judge, [seed for seed in wanted if seed not in results]):
            results[entry["seed"]] = entry
            file.write(json.dumps(entry) + "\n")
            file.flush()
            print(f"seed {entry['seed']}: {entry['verdicts']}, {entry['seconds']} s", *entry["findings"], sep="\n  ")
    print(statement(results))
    return int("not green" in statement(results))


if __name__ == "__main__":
    raise SystemExit(main())
