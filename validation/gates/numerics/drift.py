"""Probe of the numerics gate: thousands of steps from an empty state, both arms against fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from numerics.families import MINI
from numerics.families.probes import long_run
from numerics.oracles import ORACLES
from validation.gates.base import Context, Json, Plot, Table, Unit
from validation.gates.numerics.measure import ARMS, compliance_of, errors_of
from validation.targets.base import Arm

FAMILIES = ("low_rank_slow_decay", "iid", "decay_near_one", "equal_keys")
FIRST_STEPS = 8
STEPS, SHORT = 4096, 256
ROWS = 2


def units(ops: Sequence[str], deep: bool) -> list[Unit]:
    """A unit per family: two families over 256 steps, or all over 4,096."""
    return [
        Unit(
            f"probe-drift-{op}-{family}",
            {"probe": "drift", "op": op, "family": family, "steps": STEPS if deep else SHORT, "rows": ROWS},
        )
        for op in ops
        for family in (FAMILIES if deep else FAMILIES[:2])
    ]


def measure(unit: Unit, context: Context) -> dict[str, Json]:
    """Errors of state and output at steps 1 to 8 and powers of two, and the contract of the step that leads there."""
    family, steps = unit.params["family"], unit.params["steps"]
    arms = dict(zip(ARMS, (context.target.open(context.baseline), context.target.open(context.candidate)), strict=True))
    start, tokens = long_run({**MINI, "kda_num_heads": 1}, family, ROWS, steps, context.seed)
    cases = [
        {"family": f"{family}, step {step}", "seed": context.seed, "step": step} | figures
        for step, figures in _checkpoints(arms, start, tokens)
    ]
    return {**unit.params, "width": f"{steps} steps", "cases": cases}


def _checkpoints(
    arms: Mapping[str, Arm], start: dict[str, Any], tokens: Iterator[torch.Tensor]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every arm follows its own states; the fp64 one rounds nothing, ever."""
    now = dict.fromkeys((*arms, "exact"), start)
    wide = {"conv_state": start["conv_state"].double(), "state": start["state"].double()}
    now["exact"] = {**start, **wide}
    for step, proj in enumerate(tokens, 1):
        before = {name: {**case, "proj": proj} for name, case in now.items()}
        after = {name: arm.run_op("kda_step", before[name]) for name, arm in arms.items()}
        after["exact"] = ORACLES["kda_step"](before["exact"])
        now = {name: {**before[name], **{pool: after[name][pool] for pool in wide}} for name in now}
        if step <= FIRST_STEPS or step & (step - 1) == 0:
            yield step, _figures(arms, before, after)


def _figures(arms: Mapping[str, Arm], before: Mapping[str, dict[str, Any]], after: Mapping[str, Any]) -> dict[str, Any]:
    stored = {name: after[name] for name in arms}
    return {
        "outputs": errors_of("kda_step", before["candidate"], after["exact"], stored, ("y", "state")),
        "histograms": {},
        "compliance": {name: compliance_of("kda_step", arm, before[name], after[name]) for name, arm in arms.items()},
        "router": None,
        "contracts": {name: {} for name in arms},
    }


def tables(results: Mapping[str, dict[str, Json]]) -> tuple[list[Table], list[Plot]]:
    """Drift of the state by step, the first steps apart."""
    runs = {r["family"]: r["cases"] for r in results.values() if r.get("probe") == "drift"}
    if not runs:
        return [], []
    rows: list[list[str | int | float]] = []
    series: dict[str, list[float | None]] = {}
    for family, cases in runs.items():
        curve = {
            arm: [_relative(case, key) for case in cases]
            for arm, key in (("baseline", "baseline_rmse"), ("candidate", "rmse"))
        }
        first = [i for i, case in enumerate(cases) if case["step"] <= FIRST_STEPS]
        for arm, values in curve.items():
            rows.append([family, arm, *(f"{x:.1e}" for x in (max(values[i] for i in first), max(values), values[-1]))])
            series[f"{family}, {arm}"] = list(values)
    header = ["family", "arm", f"largest of steps 1 to {FIRST_STEPS}", "largest", "last"]
    caption = (
        "RMS error of the recurrent state over its RMS, against an fp64 run of the same tokens from an empty state."
    )
    steps = [case["step"] for case in next(iter(runs.values()))]
    plot = Plot("Drift of the recurrent state", "line", steps, series, "step", "RMS error / RMS", caption, True, True)
    return [Table("Drift of the recurrent state", header, rows, caption)], [plot]


def _relative(case: Mapping[str, Any], key: str) -> float:
    state = case["outputs"]["state"]
    return float(state[key] / state["reference_rms"]) if state["reference_rms"] else 0.0
