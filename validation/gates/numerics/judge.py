"""The numerics gate's rules: which figures of a measured case are reasons to fail, and the sentence for each.

Every allowance is made from the baseline's own error, the output's format or the number of roundings; there is no
absolute or relative tolerance. A baseline that errs more buys its candidate nothing: both are held to their contracts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from numerics import bounds
from numerics.families.shapes import shape
from validation.gates.base import Finding, Json

ROUTER_WEIGHT_FLOOR = bounds.gamma(24, bounds.F32.unit_roundoff)
"""Sigmoid (about four roundings), up to sixteen additions, a division and a product, all in FP32."""

ROUTER_SCORE_ULPS = 8.0
"""Scores are FP32 sigmoids plus a bias: about four roundings on either side of the cut, or of a neighbour in the order
of the ids, may swap experts that close."""


def findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """Every reason to fail in one unit's result."""
    op = result["op"]
    for case in result["cases"]:
        where = place(result, case)
        yield from (Finding(op, f"{where}: {what}", unit) for what in complaints(op, case))


def place(result: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Where a case was measured, as a phrase."""
    return (
        f"{result['op']}, {width_of(result, case)} width, {case.get('rows', result['rows'])} rows, "
        f"family {case['family']}, seed {case['seed']}"
    )


def width_of(result: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """The name of a case's width, or the shape that was its turn."""
    if "shape" not in case:
        return str(result["width"])
    rows = case.get("rows", result["rows"]) * case.get("verify_width", 1)
    return ", ".join(f"{name} {level}" for name, level in shape(result["op"], case["shape"], rows).items())


def acceptances(output: Mapping[str, float]) -> Iterator[tuple[str, bounds.Acceptance]]:
    """An output's errors against `2 x baseline + floor`."""
    yield "RMSE", bounds.accept(output["rmse"], output["baseline_rmse"], output["floor_rms"])
    yield "maximum", bounds.accept(output["max"], output["baseline_max"], output["floor_max"])


def routing_weights(router: Mapping[str, Any]) -> bounds.Acceptance:
    """The relative errors of the routing weights, which are not among the outputs: 0 would hide a small one there."""
    own, error = router["baseline"]["weight_error"], router["candidate"]["weight_error"]
    return bounds.accept(error, own, ROUTER_WEIGHT_FLOOR)


def complaints(op: str, case: Mapping[str, Any]) -> Iterator[str]:
    """Every reason to fail in one measured case."""
    for name, output in case["outputs"].items():
        for measure, acceptance in acceptances(output):
            if not acceptance:
                yield f"{measure} of {name} is {acceptance}"
    for arm, outputs in case["compliance"].items():
        yield from (_outside(arm, name, figures) for name, figures in outputs.items() if figures["outside"])
    if case["router"] is not None:
        yield from _router_complaints(case["router"], case["family"].startswith("iid"))
    for arm, contracts in case["contracts"].items():
        for contract, broken in contracts.items():
            if broken:
                yield f"contract '{contract}' of the {arm} is broken in {broken} elements"


def _outside(arm: str, name: str, figures: Mapping[str, float]) -> str:
    """The contract's own rule: an output is what its roundings make of the exact result, up to FP32 arithmetic."""
    return (
        f"{figures['outside']} of {figures['count']} elements of {name} of the {arm} lie outside its contract: "
        f"{figures['error']:.3g} from the exact result of its own roundings, FP32 arithmetic explains "
        f"{figures['bound']:.3g} before the last one ({figures['used']:.3g} times that bound would pass)"
    )


def _router_complaints(router: Mapping[str, Any], plain: bool) -> Iterator[str]:
    for arm, judged in router.items():
        if judged["malformed"]:
            yield f"{judged['malformed']} rows of the {arm} have ids twice or out of range"
        elif judged["violation_ulps"] > ROUTER_SCORE_ULPS:
            missed = f"left out an expert better by {judged['violation_ulps']:.3g} ULP, allowed {ROUTER_SCORE_ULPS}"
            yield f"the {arm} {missed}"
        elif judged["order_ulps"] > ROUTER_SCORE_ULPS:
            rise = f"{judged['order_ulps']:.3g} ULP, allowed {ROUTER_SCORE_ULPS}"
            yield f"the ids of the {arm} do not fall with their score: it rises by {rise}"
    own = router["baseline"]["weight_error"]
    if plain and not own <= ROUTER_WEIGHT_FLOOR:
        yield f"the baseline's routing weights err by {own:.3g}, its contract allows {ROUTER_WEIGHT_FLOOR:.3g}"
    weights = routing_weights(router)
    if not weights:
        yield f"relative error of the routing weights is {weights}"


def failing_cases(results: Mapping[str, dict[str, Json]]) -> list[dict[str, Json]]:
    """The cases and probes with a reason to fail, as `replay` settings that measure them again."""
    found: list[dict[str, Json]] = []
    for result in results.values():
        failing = [case for case in result["cases"] if any(True for _ in complaints(result["op"], case))]
        if failing and "replay" in result:
            found.append(result["replay"])
        else:
            found += [_named(result, case) for case in failing]
    return found


def _named(result: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Json]:
    keys = ("op", "width", "rows", "verify_width", "family", "seed", "shape")
    return {key: (case if key in case else result)[key] for key in keys if key in case or key in result}
