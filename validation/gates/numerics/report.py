"""What the numerics gate shows: each op's distance to its allowance, its contract, drift, and ULP histograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numerics.contracts import CONTRACTS, GENERIC, SPECIALIZED
from validation.gates.base import Json, Plot, Table
from validation.gates.numerics.judge import acceptances, routing_weights, width_of

Results = Mapping[str, dict[str, Json]]


@dataclass(frozen=True)
class Worst:
    """The output of an op that came closest to its allowance, or went furthest beyond it."""

    ratio: float = 0.0
    required: float = 0.0
    where: str = "none"
    bias: float = 0.0

    def as_json(self) -> dict[str, Json]:
        return {"ratio": self.ratio, "required_multiple": self.required, "where": self.where, "bias": self.bias}


@dataclass(frozen=True)
class Held:
    """How one arm's op kept to its contract over all cases."""

    elements: int = 0
    outside: int = 0
    pinned: float = 0.0
    used: float = 0.0
    where: str = "none"
    error: float = 0.0
    bound: float = 0.0

    def as_json(self) -> dict[str, Json]:
        return {"elements": self.elements, "outside": self.outside, "pinned": self.pinned, "used": self.used}


def worst(results: Results, op: str) -> Worst:
    """Over all outputs of all cases of an op."""
    found = Worst()
    for result, case in _cases(results, op):
        seen = [
            (f"{name}, {measure}", acceptance, output["bias"])
            for name, output in case["outputs"].items()
            for measure, acceptance in acceptances(output)
        ]
        if case["router"] is not None:
            seen.append(("weights, relative", routing_weights(case["router"]), 0.0))
        for what, acceptance, bias in seen:
            if acceptance.ratio > found.ratio:
                where = f"{what}, {width_of(result, case)}, {case.get('rows', result['rows'])} rows, {case['family']}"
                found = Worst(acceptance.ratio, acceptance.required_multiple, where, bias)
    return found


def held(results: Results, op: str, arm: str) -> Held:
    """Over all outputs of all cases of an op that have a contract; `pinned` is over those not in FP32."""
    found, elements, outside, pinned, countable = Held(), 0, 0, 0.0, 0
    for result, case in _cases(results, op):
        for name, figures in case["compliance"].get(arm, {}).items():
            elements, outside = elements + figures["count"], outside + figures["outside"]
            if figures["pinned"]:
                pinned, countable = pinned + figures["pinned"] * figures["count"], countable + figures["count"]
            if figures["used"] > found.used:
                where = f"{name}, {width_of(result, case)}, {case.get('rows', result['rows'])} rows, {case['family']}"
                found = Held(used=figures["used"], where=where, error=figures["error"], bound=figures["bound"])
    share = pinned / countable if countable else 0.0
    return Held(elements, outside, share, found.used, found.where, found.error, found.bound)


def error_table(results: Results, ratios: Mapping[str, Worst]) -> Table:
    """Every op's worst error against its allowance."""
    rows = []
    for op, w in ratios.items():
        cases = [case for _, case in _cases(results, op)]
        broken = sum(n for case in cases for arm in case["contracts"].values() for n in arm.values())
        rows.append([op, len(cases), f"{w.ratio:.2f}", f"{w.required:.2f}", w.where, f"{w.bias:+.1e}", broken])
    header = [
        "op",
        "cases",
        "worst error / allowed",
        "multiple that would pass",
        "where",
        "signed bias there",
        "contract breaks",
    ]
    caption = (
        "Allowed error of an output: 2 x the baseline's own error against the fp64 oracle, plus what rounding to the "
        "output's format costs. Above 1 fails. Contract breaks are counted in elements, both arms; 0 is needed."
    )
    return Table("Error of every op against its allowance", header, rows, caption)


def contract_table(results: Results, ops: Mapping[str, Worst]) -> Table:
    """Every op of the candidate against its own contract, measured error beside the bound from theory."""
    rows: list[list[str | int | float]] = []
    for op in ops:
        h = held(results, op, "candidate")
        if h.elements:
            path = SPECIALIZED if CONTRACTS[GENERIC][op] != CONTRACTS[SPECIALIZED][op] else "both paths"
            sites = ", ".join(CONTRACTS[SPECIALIZED][op].sites) or "none"
            figures: list[str | int | float] = [
                f"{h.pinned:.1%}",
                h.outside,
                f"{h.used:.2f}",
                f"{h.error:.1e}",
                f"{h.bound:.1e}",
                h.where,
            ]
            rows.append([op, f"{sites} ({path})", *figures])
    header = ["op", "rounded to BF16", "pinned", "outside", "share of the bound", "error", "FP32 bound", "where"]
    caption = (
        "The fp64 result with the contract's own roundings, and what FP32 arithmetic in any order may add (bound). "
        "Pinned: elements for which that leaves a single value. One element outside fails; above 1 in the share of the "
        "bound is the factor that would pass. Error and bound are those of the element that needs most of its bound."
    )
    return Table("Every op of the candidate against its own contract", header, rows, caption)


def ratio_plot(ratios: Mapping[str, Worst]) -> Plot:
    """Each op's worst error over its allowance."""
    series: dict[str, list[float | None]] = {"worst error / allowed": [w.ratio for w in ratios.values()]}
    title, y_label = "How close each op comes to its allowance", "measured / allowed"
    return Plot(title, "bar", list(ratios), series, "op", y_label, limit=1.0)


def histogram_plots(results: Results) -> list[Plot]:
    """Distance to the correctly rounded result, both arms, over all BF16 outputs of all ops."""
    totals: dict[str, list[int]] = {"baseline": [], "candidate": []}
    for _, case in _cases(results):
        for output in case["histograms"].values():
            for arm, counts in output.items():
                totals[arm] = _added(totals[arm], counts)
    bins = max(map(len, totals.values()))
    if not bins:
        return []
    labels = ["0", "1", *(f"{2 ** (i - 1)}-{2**i - 1}" for i in range(2, bins))][:bins]
    n = sum(totals["candidate"])
    series: dict[str, list[float | None]] = {
        arm: [count / max(1, sum(counts)) or None for count in counts] + [None] * (bins - len(counts))
        for arm, counts in totals.items()
    }
    caption = f"All BF16 outputs of all ops, n = {n} elements an arm. Families built on cancellation lie far out."
    title = "Distance to the correctly rounded result"
    return [Plot(title, "bar", labels, series, "BF16 ULP", "share of elements", caption, log_y=True)]


def _cases(results: Results, op: str | None = None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for result in results.values():
        if op is None or result["op"] == op:
            yield from ((result, case) for case in result["cases"])


def _added(a: list[int], b: list[int]) -> list[int]:
    length = max(len(a), len(b))
    return [x + y for x, y in zip(_padded(a, length), _padded(b, length), strict=True)]


def _padded(counts: list[int], length: int) -> list[int]:
    return [*counts, *([0] * (length - len(counts)))]
