"""Gate 1, numerics: is every op of the candidate as accurate as the baseline's, and what its contract says?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numerics.families import FAMILIES
from validation.gates.base import Context, GateResult, Json, Unit
from validation.gates.numerics import drift, report
from validation.gates.numerics.dims import WIDTHS
from validation.gates.numerics.judge import failing_cases, findings
from validation.gates.numerics.probes import PROBES
from validation.gates.numerics.replay import replays
from validation.gates.numerics.units import DEFAULTS, measure_unit, plan_units, unasked, with_defaults
from validation.gates.settings import integers, one_of, positive_integer, problems, subset, verify_steps
from validation.targets.base import ArmConfig, Capability
from validation.verdict import Verdict


class NumericsGate:
    """Runs every op of both arms on the same seeded cases of many input families."""

    name = "numerics"
    layer = 1
    question = "Is every op of the candidate as accurate as the baseline's, against an fp64 oracle?"
    needs = frozenset({Capability.RUN_OP})
    cost = "seconds per op; about a minute in all"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Rows, sequence lengths, verify steps, shard widths, shapes, seeds, probes, replays; optionally some ops."""
        wrong = problems(
            settings,
            {
                "rows": integers(1, 64),
                "sequence_rows": integers(1, 512),
                "verify_rows": integers(1, 32),
                "verify_widths": integers(2, 8),
                "verify_steps": verify_steps(64),
                "shard_rows": integers(1, 64),
                "shards": subset(WIDTHS),
                "shape_rows": integers(1, 64),
                "seeds": positive_integer(),
                "families": one_of("all", "in turn", "in turn for large batches"),
                "probes": subset(PROBES),
                "depth": positive_integer(),
                "ops": subset(FAMILIES, least=1),
                "replay": replays(),
            },
            optional=("ops", *DEFAULTS),
        )
        return wrong or unasked(settings)

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Both arms as they are."""
        return context.baseline, context.candidate

    def plan(self, context: Context) -> Sequence[Unit]:
        """Earlier failures first, then a unit per op, width and row count, units over shapes, and the probes."""
        return plan_units(with_defaults(context))

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """All families and seeds of one op at one width and row count, or one probe."""
        return measure_unit(unit, with_defaults(context))

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """Every output within `2 x baseline + floor` and its own contract, every exact contract kept."""
        found = [f for unit, result in results.items() for f in findings(unit, result)]
        cases = sum(len(result["cases"]) for result in results.values())
        ratios = {op: report.worst(results, op) for op in dict.fromkeys(r["op"] for r in results.values())}
        verdict = Verdict.FAIL if found or not cases else Verdict.PASS
        broken = sorted({f.component for f in found})
        summary = f"{cases} cases of {len(ratios)} ops: " + (
            f"{len(found)} findings in {', '.join(broken)}" if found else "all within the rule, all contracts kept"
        )
        drift_tables, drift_plots = drift.tables(results)
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=summary,
            findings=found,
            metrics={
                "cases": cases,
                "worst": {op: worst.as_json() for op, worst in ratios.items()},
                "contract": {op: report.held(results, op, "candidate").as_json() for op in ratios},
                "failing_cases": failing_cases(results),
            },
            tables=[report.error_table(results, ratios), report.contract_table(results, ratios), *drift_tables],
            plots=[report.ratio_plot(ratios), *drift_plots, *report.histogram_plots(results)],
        )
