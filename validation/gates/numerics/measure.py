"""Measuring one op on one case: both arms' errors against the fp64 oracle, and what their contracts leave open."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from numerics import bounds, contracts
from numerics.formats import bf16
from numerics.metrics import error_stats, root_mean_square, ulp_histogram
from numerics.oracles import ORACLES, comparable, route_disagreements, written
from validation.gates.numerics.contracts import broken_contracts, differing
from validation.targets.base import Arm, Case

F32_OUTPUTS = frozenset({"state", "logits", "weights"})
"""Outputs kept in FP32; every other floating output is BF16, or E4M3 where it is stored as bytes."""

SEQUENCE_OPS = frozenset({"kda_sequence", "mla_attend_sequence"})
"""Ops that only the generic path has: a specialised arm runs the generic ones."""

ARMS = ("baseline", "candidate")

POOLS = frozenset({"conv_state", "state", "cache"})
"""Outputs that are pools which the op wrote in place."""

STORED_AS = {"bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.uint8}
"""Types of the formats that a contract names."""


def path_of(arm: Arm, op: str) -> str:
    """The path whose contract an arm's op is held to."""
    specialized = arm.config.decode_backend == "latency_specialized" and op not in SEQUENCE_OPS
    return contracts.SPECIALIZED if specialized else contracts.GENERIC


def measure_case(op: str, case: Case, baseline: Arm, candidate: Arm, exact_contracts: bool = True) -> dict[str, Any]:
    """Errors of both arms per output, compliance with their contracts, ULP histogram, router and exact contracts.

    The result is plain JSON.
    """
    arms = dict(zip(ARMS, (baseline, candidate), strict=True))
    stored, changed = _run(op, case, arms)
    masks, reference = written(op, case), ORACLES[op](case)
    paths = {name: path_of(arm, op) for name, arm in arms.items()}
    held = _compliance(op, paths, case, stored, masks)
    broken = {
        name: broken_contracts(
            op,
            case,
            lambda inputs, arm=arm: _kept(arm.run_op(op, inputs)),  # type: ignore[misc]
            placement=name == "candidate",
            clean=stored[name],
        )
        for name, arm in (arms.items() if exact_contracts else ())
    }
    for name, elements in changed.items():
        counts = broken.setdefault(name, {})
        counts["inputs unchanged"] = counts.get("inputs unchanged", 0) + elements
        counts["outputs in their formats"] = sum(int(figures["other_format"]) for figures in held[name].values())
    return {
        "outputs": errors_of(op, case, reference, stored),
        "histograms": _histograms(op, case, reference, stored),
        "compliance": held,
        "router": _router(case, stored) if op == "route" else None,
        "contracts": broken,
    }


def _run(op: str, case: Case, arms: Mapping[str, Arm]) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
    """Outputs by arm, and how many elements of its inputs each arm changed. Arms get copies."""
    stored, changed = {}, {}
    for name, arm in arms.items():
        given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in case.items()}
        stored[name] = _kept(arm.run_op(op, given))
        changed[name] = sum(differing(x, given[key]) for key, x in case.items() if isinstance(x, Tensor))
    return stored, changed


def _kept(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs that stay as they are: an op may give the same memory back at its next call. Pools are copies already."""
    return {name: x if name in POOLS else x.clone() for name, x in outputs.items()}


def errors_of(
    op: str,
    case: Case,
    reference: Mapping[str, Tensor],
    stored: Mapping[str, Mapping[str, Tensor]],
    names: Collection[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Errors of both arms' outputs (or those of `names`) against an fp64 reference, where the op may write."""
    masks = written(op, case)
    values = {arm: comparable(op, case, outputs) for arm, outputs in stored.items()}
    errors = {}
    for name, exact in reference.items():
        owned: Any = masks.get(name, slice(None))
        unjudged = exact.dtype == torch.int64 or not exact[owned].numel() or (op == "route" and name == "weights")
        if unjudged or (names is not None and name not in names):
            continue
        floor = _floor(op, name, case, stored["candidate"][name], exact[owned])
        errors[name] = _errors(exact[owned], values["baseline"][name][owned], values["candidate"][name][owned], floor)
    return errors


def _histograms(
    op: str, case: Case, reference: Mapping[str, Tensor], stored: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, list[int]]]:
    """ULP histograms of the BF16 outputs that are no pools."""
    pools = written(op, case)
    return {
        name: {arm: _histogram(outputs[name], exact) for arm, outputs in stored.items()}
        for name, exact in reference.items()
        if name not in F32_OUTPUTS and name not in pools and stored["candidate"][name].dtype == torch.bfloat16
    }


def compliance_of(op: str, arm: Arm, case: Case, outputs: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Every output of one arm against what its path's contract leaves open."""
    return _held(outputs, _expected(op, path_of(arm, op), case, outputs), written(op, case))


def _compliance(
    op: str,
    paths: Mapping[str, str],
    case: Case,
    stored: Mapping[str, dict[str, Tensor]],
    masks: Mapping[str, Tensor],
) -> dict[str, dict[str, dict[str, float]]]:
    """Every output of every arm against what its path's contract leaves open."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    known: dict[str, dict[str, contracts.Expected]] = {}
    for arm, outputs in stored.items():
        # An output may be held to another one that the arm stored: the mix to the prefix, the weights to the ids.
        wanted = None if "prefix" in outputs or op == "route" else known.get(paths[arm])
        if wanted is None:
            wanted = known[paths[arm]] = _expected(op, paths[arm], case, outputs)
        results[arm] = _held(outputs, wanted, masks)
    return results


def _held(
    outputs: Mapping[str, Tensor], wanted: Mapping[str, contracts.Expected], masks: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    results = {}
    for name, expected in wanted.items():
        owned: Any = masks.get(name, slice(None))
        if outputs[name][owned].numel():
            stored = outputs[name][owned]
            other = 0 if stored.dtype is STORED_AS[expected.fmt] else stored.numel()
            results[name] = {**asdict(contracts.compliance(stored, expected[owned])), "other_format": other}
    return results


def _expected(op: str, path: str, case: Case, outputs: Mapping[str, Tensor]) -> dict[str, contracts.Expected]:
    if op != "route":
        return contracts.expected(op, path, case, outputs)
    # Ids out of range are reported by the router's own judgement; here they only must not stop the rest.
    ids = outputs["ids"].clamp(0, case["logits"].shape[-1] - 1)
    return {"weights": contracts.route_weights(case, ids)}


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
    return list(ulp_histogram(values, bf16(exact)).counts)


def _router(case: Case, stored: Mapping[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Chosen sets against fp64 with ties as ties, weights against the unbiased scores, and experts that were hit."""
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
            "experts_hit": int(outputs["ids"].unique().numel()),
            "experts": case["logits"].shape[-1],
        }
    return result
