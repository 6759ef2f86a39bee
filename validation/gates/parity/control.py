"""The known-worse control: how far is a recurrent state kept in BF16 from one in FP32, and would it be told apart?

Keys of low rank under a slow decay: the delta rule rewrites the same few directions of the state, and what BF16 rounds
away in them adds up. The candidate's own step runs on the same tokens twice, with its state as it is and rounded to
BF16 after every token, each against fp64 from the same empty state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from numerics.families import MINI
from numerics.families.probes import long_run
from numerics.oracles import ORACLES
from validation.gates.base import Context, Finding
from validation.gates.parity.measure import relative_rms
from validation.targets.base import Capability

UNIT = "bf16-state-control"
"""The unit's id."""

FAMILY, ROWS, STEPS = "low_rank_slow_decay", 2, 256

LEAST = 2.0
"""Errors of a candidate's state that the numerics gate allows, in the baseline's: the control must be beyond them."""


def refusal(context: Context) -> str | None:
    """Why the control cannot be had on this target, or None."""
    if not context.settings.get("controls") or Capability.RUN_OP in context.target.capabilities:
        return None
    return f"target {context.target.name!r} cannot run single ops; take `controls` out of the profile"


def measure_control(context: Context) -> dict[str, Any]:
    """Plain JSON: relative RMS errors of both states at steps 1, 2, 4, .."""
    arm = context.target.open(context.candidate)
    start, tokens = long_run({**MINI, "kda_num_heads": 1}, FAMILY, ROWS, STEPS, context.seed)
    exact = {**start, "conv_state": start["conv_state"].double(), "state": start["state"].double()}
    runs = {"f32": start, "bf16": start}
    curves: dict[str, list[float]] = {"step": [], "f32": [], "bf16": []}
    for step, proj in enumerate(tokens, 1):
        exact = _stepped(exact, proj, ORACLES["kda_step"]({**exact, "proj": proj}))
        runs = {
            name: _stepped(case, proj, arm.run_op("kda_step", {**case, "proj": proj})) for name, case in runs.items()
        }
        rounded = runs["bf16"]["state"]
        runs["bf16"]["state"] = rounded.bfloat16().to(rounded.dtype)
        if step & (step - 1) == 0:
            curves["step"].append(step)
            for name, case in runs.items():
                curves[name].append(relative_rms([(exact["state"], case["state"])]))
    return {"control": UNIT, **curves, "times": curves["bf16"][-1] / curves["f32"][-1]}


def _stepped(case: Mapping[str, Any], proj: Tensor, after: Mapping[str, Tensor]) -> dict[str, Any]:
    return {**case, "proj": proj, "conv_state": after["conv_state"], "state": after["state"]}


def control_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """The control must be beyond what a candidate may be; else the gate would pass a state in BF16."""
    if not result["times"] > LEAST:
        message = (
            f"the known-worse control, a state in BF16, has {result['times']:.3g} times the error of the candidate's "
            f"own after {STEPS} steps of low-rank keys; more than {LEAST:g} is needed to tell them apart: "
            "the candidate's state is rounded as the control's is"
        )
        yield Finding("state cache", message, unit)


def control_sentence(result: Mapping[str, Any]) -> str:
    """The figure for the summary."""
    return (
        f"; a state in BF16 (control) has {result['times']:.3g} times the error of the candidate's after {STEPS} steps "
        f"of low-rank keys ({result['bf16'][-1]:.2g} against {result['f32'][-1]:.2g}, relative RMS)"
    )
