"""Gate 1, numerics: is every op of the candidate as accurate as the baseline's, against an fp64 oracle?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numerics import bounds
from numerics.families import FAMILIES, K3_SHARD_8, K3_SHARD_16, Dims, make_case
from validation.gates.base import Context, Finding, GateResult, Json, Plot, Table, Unit
from validation.gates.numerics_measure import measure_case
from validation.gates.settings import integers, positive_integer, problems, subset
from validation.targets.base import ArmConfig, Capability, Target
from validation.verdict import Verdict

MODEL = "model"
SHARDS: dict[str, Dims] = {"k3_shard_8": K3_SHARD_8, "k3_shard_16": K3_SHARD_16}
"""True per-rank widths of the big model, for the ops that are cut by heads or whose selection depends on size."""

SHARD_OPS = ("kda_step", "mla_query", "mla_attend", "mla_value", "route")

SEQUENCE_OPS = ("kda_sequence", "mla_attend_sequence")

BF16_ROUNDINGS = {
    "projection": 1,
    "rms_norm": 1,
    "all_reduce": 1,
    "attn_res": 2,
    "output_mix": 4,
    "kda_step": 4,
    "kda_sequence": 4,
    "mla_query": 4,
    "mla_attend": 2,
    "mla_attend_sequence": 1,
    "mla_value": 2,
    "moe_front": 1,
    "experts": 3,
    "shared_expert": 3,
    "moe_tail": 5,
}
"""Roundings to BF16 on the longest way through an op (docs/ops.md). Each errs by at most half a ULP, 2^-9 relative, so
on independent inputs an implementation that follows the contract stays below their sum; E4M3 outputs add 2^-5."""

ROUTER_WEIGHT_FLOOR = bounds.gamma(24, bounds.F32.unit_roundoff)
"""Sigmoid (about four roundings), up to sixteen additions, a division and a product, all in FP32."""

LOGIT_GROWTH = 128.0
"""Router logits stay FP32. Their floor is one rounding at the size of sum |x||w|; up to 2^14 additions with independent
roundings err by at most the square root of their number in RMS. Rounding to BF16 costs 350 floors and more there."""

ROUTER_SCORE_ULPS = 8.0
"""Scores are FP32 sigmoids plus a bias: about four roundings on either side of the cut may swap experts that close."""


class NumericsGate:
    """Runs every op of both arms on the same seeded cases of many input families."""

    name = "numerics"
    layer = 1
    question = "Is every op of the candidate as accurate as the baseline's, against an fp64 oracle?"
    needs = frozenset({Capability.RUN_OP})
    cost = "seconds per op; about a minute in all"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Rows, sequence lengths, seeds per case, shard widths, and optionally a choice of ops."""
        return problems(
            settings,
            {
                "rows": integers(1, 64),
                "sequence_rows": integers(1, 512),
                "shard_rows": integers(1, 64),
                "shards": subset(SHARDS),
                "seeds": positive_integer(),
                "ops": subset(FAMILIES, least=1),
            },
            optional=("ops",),
        )

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Both arms as they are."""
        return context.baseline, context.candidate

    def plan(self, context: Context) -> Sequence[Unit]:
        """A unit per op, width and row count."""
        settings = context.settings
        chosen = settings.get("ops", sorted(FAMILIES))
        units = []
        for op in chosen:
            rows = settings["sequence_rows" if op in SEQUENCE_OPS else "rows"]
            units += [_unit(op, MODEL, n) for n in rows]
            if op in SHARD_OPS:
                units += [_unit(op, width, n) for width in settings["shards"] for n in settings["shard_rows"]]
        return units

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """All families and seeds of one op at one width and row count."""
        op, width, rows = unit.params["op"], unit.params["width"], unit.params["rows"]
        dims = _model_dims(context.target) if width == MODEL else SHARDS[width]
        baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
        cases = []
        for family in FAMILIES[op]:
            for repeat in range(context.settings["seeds"]):
                seed = context.seed * 1000 + repeat
                case = make_case(op, dims, family, rows, seed)
                cases.append({"family": family, "seed": seed, **measure_case(op, case, baseline, candidate)})
        return {"op": op, "width": width, "rows": rows, "cases": cases}

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """Every output within `2 x baseline + floor`, the baseline itself sane, every exact contract kept."""
        findings = [f for unit, result in results.items() for f in _findings(unit, result)]
        cases = sum(len(result["cases"]) for result in results.values())
        ratios = {op: _worst(results, op) for op in dict.fromkeys(r["op"] for r in results.values())}
        verdict = Verdict.FAIL if findings or not cases else Verdict.PASS
        broken = sorted({f.component for f in findings})
        summary = f"{cases} cases of {len(ratios)} ops: " + (
            f"{len(findings)} findings in {', '.join(broken)}"
            if findings
            else "all within the rule, all contracts kept"
        )
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=summary,
            findings=findings,
            metrics={"cases": cases, "worst": {op: worst.as_json() for op, worst in ratios.items()}},
            tables=[_table(results, ratios)],
            plots=[_ratio_plot(ratios), *_histogram_plots(results)],
        )


@dataclass(frozen=True)
class _Worst:
    """The output of an op that came closest to its allowance, or went furthest beyond it."""

    ratio: float = 0.0
    required: float = 0.0
    where: str = ""
    bias: float = 0.0

    def as_json(self) -> dict[str, Json]:
        return {"ratio": self.ratio, "required_multiple": self.required, "where": self.where, "bias": self.bias}


def _unit(op: str, width: str, rows: int) -> Unit:
    return Unit(f"{op}-{width}-n{rows}", {"op": op, "width": width, "rows": rows})


def _model_dims(target: Target) -> Dims:
    """The target's own dimensions under the names of the input families."""
    d = target.dims()
    return {
        **d,
        "kda_num_heads": d["linear_attn_num_heads"],
        "kda_head_dim": d["linear_attn_head_dim"],
        "num_experts_per_token": d["num_experts_per_token"],
        "experts_held": min(d["num_experts"], 32),
        "shared_intermediate_size": d["num_shared_experts"] * d["moe_intermediate_size"],
        "attn_res_blocks": -(-d["num_hidden_layers"] // d["attn_res_block_size"]),
        "ranks": 8,
        "page_size": 16,
        "projection_size": 320,
    }


def _acceptances(output: Mapping[str, float]) -> Iterator[tuple[str, bounds.Acceptance]]:
    yield "RMSE", bounds.accept(output["rmse"], output["baseline_rmse"], output["floor_rms"])
    yield "maximum", bounds.accept(output["max"], output["baseline_max"], output["floor_max"])


def _findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    op = result["op"]
    for index, case in enumerate(result["cases"]):
        where = f"{op}, {result['width']} width, {result['rows']} rows, family {case['family']}, seed {case['seed']}"
        for name, output in case["outputs"].items():
            for measure, acceptance in _acceptances(output):
                if not acceptance:
                    yield Finding(op, f"{where}: {measure} of {name} is {acceptance}", unit)
            if index == 0 and output["baseline_rmse"] > _sane_baseline(op, name, output):
                allowed = _sane_baseline(op, name, output)
                message = (
                    f"the baseline's RMSE of {name} is {output['baseline_rmse']:.3g}, its contract allows {allowed:.3g}"
                )
                yield Finding(op, f"{where}: {message}", unit)
        yield from _router_findings(op, where, unit, case["router"], plain=index == 0)
        for arm, contracts in case["contracts"].items():
            for contract, broken in contracts.items():
                if broken:
                    yield Finding(
                        op, f"{where}: contract '{contract}' of the {arm} is broken in {broken} elements", unit
                    )


def _sane_baseline(op: str, name: str, output: Mapping[str, float]) -> float:
    """Error that an implementation following the contract may have on plain random inputs."""
    if name == "logits":
        return LOGIT_GROWTH * output["floor_rms"]
    relative = BF16_ROUNDINGS[op] * 2.0**-9
    # Only E4M3 outputs have a floor that coarse.
    if output["floor_rms"] > 2.0**-7 * output["reference_rms"]:
        relative += 2.0**-5
    return relative * output["reference_rms"] + output["floor_rms"]


def _router_findings(
    op: str, where: str, unit: str, router: Mapping[str, Any] | None, plain: bool
) -> Iterator[Finding]:
    if router is None:
        return
    for arm, judged in router.items():
        if judged["malformed"]:
            yield Finding(op, f"{where}: {judged['malformed']} rows of the {arm} have ids twice or out of range", unit)
        elif judged["violation_ulps"] > ROUTER_SCORE_ULPS:
            missed = f"left out an expert better by {judged['violation_ulps']:.3g} ULP, allowed {ROUTER_SCORE_ULPS}"
            yield Finding(op, f"{where}: the {arm} {missed}", unit)
    own = router["baseline"]["weight_error"]
    if plain and not own <= ROUTER_WEIGHT_FLOOR:
        message = f"the baseline's routing weights err by {own:.3g}, its contract allows {ROUTER_WEIGHT_FLOOR:.3g}"
        yield Finding(op, f"{where}: {message}", unit)
    weights = _routing_weights(router)
    if not weights:
        yield Finding(op, f"{where}: relative error of the routing weights is {weights}", unit)


def _routing_weights(router: Mapping[str, Any]) -> bounds.Acceptance:
    """The relative errors of the routing weights, which are not among the outputs: 0 would hide a small one there."""
    own, error = router["baseline"]["weight_error"], router["candidate"]["weight_error"]
    return bounds.accept(error, own, ROUTER_WEIGHT_FLOOR)


def _worst(results: Mapping[str, dict[str, Json]], op: str) -> _Worst:
    worst = _Worst(where="none")
    for result in results.values():
        for case in result["cases"] if result["op"] == op else ():
            seen = [
                (f"{name}, {measure}", acceptance, output["bias"])
                for name, output in case["outputs"].items()
                for measure, acceptance in _acceptances(output)
            ]
            if case["router"] is not None:
                seen.append(("weights, relative", _routing_weights(case["router"]), 0.0))
            for what, acceptance, bias in seen:
                if acceptance.ratio > worst.ratio:
                    where = f"{what}, {result['width']}, {result['rows']} rows, {case['family']}"
                    worst = _Worst(acceptance.ratio, acceptance.required_multiple, where, bias)
    return worst


def _table(results: Mapping[str, dict[str, Json]], ratios: Mapping[str, _Worst]) -> Table:
    rows = []
    for op, worst in ratios.items():
        cases = [case for result in results.values() if result["op"] == op for case in result["cases"]]
        broken = sum(n for case in cases for arm in case["contracts"].values() for n in arm.values())
        rows.append(
            [op, len(cases), f"{worst.ratio:.2f}", f"{worst.required:.2f}", worst.where, f"{worst.bias:+.1e}", broken]
        )
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


def _ratio_plot(ratios: Mapping[str, _Worst]) -> Plot:
    series: dict[str, list[float | None]] = {"worst error / allowed": [worst.ratio for worst in ratios.values()]}
    title, y_label = "How close each op comes to its allowance", "measured / allowed"
    return Plot(title, "bar", list(ratios), series, "op", y_label, limit=1.0)


def _histogram_plots(results: Mapping[str, dict[str, Json]]) -> list[Plot]:
    """Distance to the correctly rounded result, both arms, over all BF16 outputs of all ops."""
    totals: dict[str, list[int]] = {"baseline": [], "candidate": []}
    for result in results.values():
        for case in result["cases"]:
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


def _added(a: list[int], b: list[int]) -> list[int]:
    length = max(len(a), len(b))
    return [x + y for x, y in zip(_padded(a, length), _padded(b, length), strict=True)]


def _padded(counts: list[int], length: int) -> list[int]:
    return [*counts, *([0] * (length - len(counts)))]
