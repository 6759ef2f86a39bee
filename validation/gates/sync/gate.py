"""Gate 3, sync: can any order of stores and steps make the collectives wrong, hang, or tell ranks different things?

Three ways: the protocols' own programs are explored under a memory model, run by processes on shared memory with
delays, and, where asked for, the kernels run under compute-sanitizer. Broken variants of the same run say what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from validation.gates.base import Context, GateResult, Json, Unit
from validation.gates.settings import at_least_zero, integers, positive_integer, problems
from validation.gates.sync.judge import findings_of, missed_controls, undecided_of
from validation.gates.sync.report import replays_of, summary, tables, trace_plots
from validation.sync.controls import controls_explored
from validation.sync.exploring import explored, scenarios_of, walked
from validation.sync.faulty import COMPONENT
from validation.sync.sanitizers import sanitized
from validation.sync.sentinels import checked
from validation.sync.stressing import stressed
from validation.targets.base import ArmConfig, Capability, CollectiveArm
from validation.verdict import Verdict


class SyncGate:
    """Exploration, stress and sanitizers over the candidate's collectives."""

    name = "sync"
    layer = 3
    question = "Can an order of stores and steps make the collectives wrong, hang them, or part the ranks?"
    needs = frozenset({Capability.COLLECTIVES})
    cost = "half a minute on two cores; three minutes with three ranks that stall"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Ranks explored in full, with stalls, by random walks and under stress; walks, steps and draws of delays."""
        return problems(
            settings,
            {
                "exhaustive_ranks": integers(2, 4),
                "stall_ranks": integers(2, 3),
                "walk_ranks": integers(4, 16),
                "walks": positive_integer(100_000),
                "stress_ranks": integers(2, 8),
                "stress_steps": positive_integer(100_000),
                "stress_draws": positive_integer(1_000),
                "sanitize": at_least_zero(1),
            },
            optional=("sanitize",),
        )

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """The candidate, as small as it can be: its collectives are asked for, no step is run."""
        return [_candidate(context)]

    def plan(self, context: Context) -> Sequence[Unit]:
        """Costly units first, so that they do not run alone at the end."""
        settings = context.settings
        names = [
            *(f"stalls-{ranks}" for ranks in sorted(settings["stall_ranks"], reverse=True)),
            *(f"stress-{ranks}" for ranks in settings["stress_ranks"]),
            "controls",
            *(f"collectives-{ranks}" for ranks in sorted(settings["exhaustive_ranks"], reverse=True)),
            *(f"walks-{ranks}" for ranks in settings["walk_ranks"]),
            "sentinels",
            "launches",
            *(["sanitizers"] if settings.get("sanitize") else []),
        ]
        return [Unit(name) for name in names]

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Explore, walk, stress or check what the unit names."""
        arm = cast(CollectiveArm, context.target.open(_candidate(context)))
        parts, settings = arm.collectives(), context.settings
        faults = [fault.id for fault in context.candidate.faults if fault.component == COMPONENT]
        name, _, ranks = unit.id.partition("-")
        if name == "stress":
            seeds = [context.seed + draw for draw in range(settings["stress_draws"])]
            return stressed(int(ranks), settings["stress_steps"], seeds, faults)
        if name == "walks":
            return walked(parts, int(ranks), settings["walks"], context.seed, faults)
        if name == "sentinels":
            return checked(parts)
        if name == "controls":
            return controls_explored(parts, ranks=(2,))
        if name == "sanitizers":
            return sanitized()
        return explored(scenarios_of(unit.id, parts), parts, faults)

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """No violation, no failure, every stop told on every rank, every control caught."""
        findings, undecided = findings_of(results), undecided_of(results)
        # Where the protocols themselves are broken, a control on top of that proves nothing either way.
        missed = [] if findings else missed_controls(results)
        skipped = results.get("sanitizers", {}).get("skipped", "")
        verdict = Verdict.PASS if results else Verdict.FAIL
        if findings:
            verdict = Verdict.FAIL
        elif missed:
            verdict = Verdict.ERROR
        elif undecided:
            verdict = Verdict.INCONCLUSIVE
        elif skipped:
            verdict = Verdict.SKIPPED
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=summary(results, findings, missed, undecided, skipped),
            findings=findings,
            metrics={"replays": replays_of(results)},
            tables=tables(results),
            plots=trace_plots(results),
        )


def _candidate(context: Context) -> ArmConfig:
    return replace(context.candidate, max_batch=1, max_context=64, drafts=0, tensor_parallel=1, context_parallel=1)
