"""Measuring one op on one case: both arms' errors against the fp64 oracle on the same stored inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numerics import bounds
from numerics.metrics import error_stats, root_mean_square, ulp_histogram
from numerics.oracles import ORACLES, comparable, route_disagreements, written
from validation.gates.numerics_contracts import CONTRACTS
from validation.targets.base import Arm, Case

F32_OUTPUTS = frozenset({"state", "logits", "weights"})
"""Outputs kept in FP32; every other floating output is BF16, or E4M3 where it is stored as bytes."""


def measure_case(op: str, case: Case, baseline: Arm, candidate: Arm) -> dict[str, Any]:
    """Errors of both arms per output, a ULP histogram, the router's judgement and the exact contracts; plain JSON."""
    reference = ORACLES[op](case)
    stored = {"baseline": baseline.run_op(op, case), "candidate": candidate.run_op(op, case)}
    values = {arm: comparable(op, case, outputs) for arm, outputs in stored.items()}
    masks = written(op, case)
    outputs, histograms = {}, {}
    for name, exact in reference.items():
        if exact.dtype == torch.int64:
            continue
        rows = masks.get(name)
        owned = slice(None) if rows is None else rows
        if not exact[owned].numel() or (op == "route" and name == "weights"):
            continue
        floor = _floor(op, name, case, stored["candidate"][name], exact[owned])
        outputs[name] = _errors(exact[owned], values["baseline"][name][owned], values["candidate"][name][owned], floor)
        if name not in F32_OUTPUTS and name not in masks and stored["candidate"][name].dtype == torch.bfloat16:
            histograms[name] = {arm: _histogram(values[arm][name], exact) for arm in values}
    return {
        "outputs": outputs,
        "histograms": histograms,
        "router": _router(case, stored) if op == "route" else None,
        "contracts": _contracts(op, case, baseline, candidate),
    }


def _errors(exact: Tensor, baseline: Tensor, candidate: Tensor, floor: bounds.Floor) -> dict[str, float]:
    b, c = error_stats(baseline, exact), error_stats(candidate, exact)
    return {
        "count": c.count,
        "reference_rms": root_mean_square(exact),
        "nonfinite": c.candidate_nan + c.candidate_inf,
        "rmse": c.rmse,
        "baseline_rmse": b.rmse,
        "floor_rms": floor.rms,
        "max": c.max_abs,
        "baseline_max": b.max_abs,
        "floor_max": floor.max,
        "bias": c.bias,
        "baseline_bias": b.bias,
    }


def _floor(op: str, name: str, case: Case, stored: Tensor, exact: Tensor) -> bounds.Floor:
    """What rounding the exact result into its output format costs; nothing can be asked to do better."""
    if op == "moe_front" and name == "logits":
        return _accumulation_floor(case["x"], case["gate_weight"])
    if stored.dtype == torch.uint8:
        return bounds.output_floor(exact, bounds.E4M3, case["q_scale" if name == "q" else "k_scale"])
    return bounds.output_floor(exact, bounds.F32 if name in F32_OUTPUTS else bounds.BF16)


def _accumulation_floor(x: Tensor, weight: Tensor) -> bounds.Floor:
    """Floor of an unrounded FP32 dot product: one rounding at the size of sum |x||w|.

    Under cancellation the partial sums are far larger than the result, and some partial sum has to be rounded.
    """
    size = x.double().abs() @ weight.double().abs().T * bounds.F32.unit_roundoff
    return bounds.Floor(rms=root_mean_square(size), max=float(size.max()))


def _histogram(values: Tensor, exact: Tensor) -> list[int]:
    return list(ulp_histogram(values.bfloat16(), exact.bfloat16()).counts)


def _router(case: Case, stored: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Chosen sets against fp64 with ties as ties, and weights against the unbiased scores of the chosen ids."""
    result = {}
    for arm, outputs in stored.items():
        judged = route_disagreements(
            case["logits"], case["bias"], outputs["ids"], case["top_k"], outputs["weights"], case["scaling"]
        )
        result[arm] = {
            "rows": judged.rows,
            "malformed": judged.malformed,
            "violation_ulps": float(judged.violation_ulps.max()),
            "order_ulps": float(judged.order_ulps.max()),
            "weight_error": judged.weight_error,
        }
    return result


def _contracts(op: str, case: Case, baseline: Arm, candidate: Arm) -> dict[str, dict[str, int]]:
    """Broken elements by arm and contract."""
    broken: dict[str, dict[str, int]] = {}
    for label, arm in (("baseline", baseline), ("candidate", candidate)):
        broken[label] = {
            name: check(op, case, lambda inputs, arm=arm: arm.run_op(op, inputs))  # type: ignore[misc]
            for name, check in CONTRACTS.items()
            if label == "candidate" or name != "row order free"
        }
    return broken
