"""The parity gate between vLLM's own K3 path and ours, on a machine that has vLLM and little else.

    python -m benchmarks.vllm_reference.run_gate OUT [--profile FILE] [--model FOLDER] [--seed N]

Writes OUT/parity.json (verdict, summary, findings, metrics, tables) and OUT/vllm.log; ends with the gate's exit code.
It does what `decodegate run --gate parity` does with the same profile, without the record and the reports.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tomllib
from pathlib import Path

from benchmarks.vllm_reference.run_vllm import SHIPPED
from validation.gates.base import Context
from validation.gates.parity.gate import ParityGate
from validation.records.jsonio import named
from validation.targets.base import ArmConfig
from validation.targets.vllm import VllmTarget
from validation.verdict import exit_code

PROFILE = Path(__file__).with_name("against_builtin.toml")


def main() -> int:
    """Measure every cell, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    profile = tomllib.loads(given.profile.read_text(encoding="utf-8"))
    given.out.mkdir(parents=True, exist_ok=True)
    target = VllmTarget.configured(given.model, profile["target"].get("options", {}))
    target.keep_in(given.out)
    arms = (ArmConfig(name, **profile[name]) for name in ("baseline", "candidate"))
    gate = ParityGate()
    context = Context(target, *arms, seed=given.seed, settings=profile["gates"]["parity"])
    problem = gate.settings_error(context.settings)
    if problem:
        sys.exit(f"{given.profile}: [gates.parity]: {problem}")
    results = {}
    for unit in gate.plan(context):
        results[unit.id] = gate.measure(unit, context)
        print(f"{unit.id}: {results[unit.id]['tokens']} tokens", flush=True)
    result = gate.judge(results, context)
    target.engines.close()
    written = {"fingerprint": target.fingerprint(), **named(dataclasses.asdict(result))}
    (given.out / "parity.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"{result.verdict}: {result.summary}")
    for finding in result.findings:
        print(f"  {finding.component}: {finding.message}")
    return exit_code(result.verdict, bisect=False)


if __name__ == "__main__":
    sys.exit(main())
