"""Gate 2, parity: do the candidate's next-token logits stay as close to the baseline's as the baseline to itself?

The noise floor comes first: the baseline against itself, with the same sequences batched otherwise and, where the
target has ranks, with another number of them. The candidate passes where its typical KL from the baseline is shown to
be at most TYPICAL_MULTIPLE floors, by a bootstrap over sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from validation.gates.base import Context, GateResult, Json, Table, Unit
from validation.gates.parity import control
from validation.gates.parity.cells import (
    cell_units,
    context_error,
    drafts_rule,
    matrix_arms,
    measure_cell,
    rows_error,
    sequences_error,
    unit_seed,
)
from validation.gates.parity.fuzz import fuzz_findings, fuzz_refusal, fuzz_table, fuzz_units, measure_fuzz
from validation.gates.parity.judge import judge_cell
from validation.gates.parity.measure import Arms, windows
from validation.gates.parity.report import (
    cell_table,
    flip_plot,
    flip_table,
    layer_plots,
    position_plot,
    ratio_plot,
    summary,
)
from validation.gates.parity.schedule_judge import schedule_findings, schedule_table
from validation.gates.parity.schedule_measure import measure_schedules
from validation.gates.parity.schedules import SCENARIOS, TEXT_LENGTH, TEXTS
from validation.gates.settings import cells, integers, positive_integer, problems, subset
from validation.targets.base import ArmConfig, Capability
from validation.verdict import Verdict


class ParityGate:
    """Teacher-forced decode of real text in both arms, per cache format, tensor parallelism and batch size."""

    name = "parity"
    layer = 2
    question = "Are the candidate's next-token logits as close to the baseline's as the baseline is to itself?"
    needs = frozenset({Capability.TEACHER_FORCED, Capability.FULL_LOGITS})
    cost = "a decode of every cell in three compositions; minutes in all"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Lengths, the least number of sequences a batch size gets, and the cells of the matrix, each named once."""
        wrong = problems(
            settings,
            {
                "prompt_length": positive_integer(100_000),
                "decode_length": positive_integer(100_000),
                "min_sequences": positive_integer(10_000),
                "most_sequences": positive_integer(10_000),
                "cells": cells(
                    ("bf16", "fp8"),
                    optional={"drafts": drafts_rule(), "context_parallel": positive_integer(64)},
                    tensor_parallel=integers(1, 64),
                    batches=integers(1, 64),
                ),
                "schedules": subset(SCENARIOS),
                "fuzz_seeds": positive_integer(1000),
                "fuzz_steps": positive_integer(10**6),
                "sampled_answers": positive_integer(10**6),
                "controls": subset((control.UNIT,)),
            },
            optional=("most_sequences", "schedules", "fuzz_seeds", "fuzz_steps", "sampled_answers", "controls"),
        )
        if not wrong and ("fuzz_seeds" in settings) != ("fuzz_steps" in settings):
            wrong = "fuzz_seeds (searches) and fuzz_steps (engine steps of each) are given together"
        wrong = wrong or rows_error(settings) or context_error(settings) or sequences_error(settings)
        if wrong:
            return wrong
        ids = [unit.id for unit in _units(settings)]
        twice = sorted({unit for unit in ids if ids.count(unit) > 1})
        return f"cells name {', '.join(twice)} more than once" if twice else None

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Baseline, candidate and floor of every cache format and rank count, at their largest batch."""
        windows(context.target, 1, context.settings["prompt_length"] + context.settings["decode_length"], context.seed)
        schedules = context.settings.get("schedules", [])
        if schedules and Capability.SCHEDULE not in context.target.capabilities:
            raise ValueError(
                f"target {context.target.name!r} cannot play schedules; take `schedules` out of the profile"
            )
        if schedules:
            windows(context.target, 1, TEXT_LENGTH, context.seed)
        if refusal := fuzz_refusal(context) or control.refusal(context):
            raise ValueError(refusal)
        return [
            *(_schedule_arms(context) if schedules else ()),
            *matrix_arms(context),
        ]

    def plan(self, context: Context) -> Sequence[Unit]:
        """A unit per cell, schedule and search."""
        return _units(context.settings)

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Decode the unit's sequences in both arms and in the baseline's other composition, or play its schedules."""
        if "schedule" in unit.params:
            return _measure_schedule(unit, context)
        if "control" in unit.params:
            return control.measure_control(context)
        if "fuzz" in unit.params:
            return measure_fuzz(unit, context)
        return measure_cell(unit, context)

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """Every cell equivalent, its caches within their multiple, the candidate's own path run, all schedules kept."""
        played = {unit: result for unit, result in results.items() if "schedule" in result}
        fuzzed = {unit: result for unit, result in results.items() if "fuzz" in result}
        controls = {unit: result for unit, result in results.items() if "control" in result}
        results = {unit: r for unit, r in results.items() if unit not in {*played, *fuzzed, *controls}}
        judged = {
            unit: judge_cell(unit, result, unit_seed(context.seed, unit), len(results))
            for unit, result in results.items()
        }
        findings = [finding for cell in judged.values() for finding in cell.findings]
        findings += [finding for unit, result in played.items() for finding in schedule_findings(unit, result)]
        findings += [finding for unit, result in fuzzed.items() for finding in fuzz_findings(unit, result)]
        findings += [f for unit, result in controls.items() for f in control.control_findings(unit, result)]
        undecided = [unit for unit, cell in judged.items() if cell.undecided]
        tokens = sum(result["tokens"] for result in results.values())
        verdict = Verdict.PASS
        if findings or not (tokens or played or fuzzed):
            verdict = Verdict.FAIL
        elif undecided:
            verdict = Verdict.INCONCLUSIVE
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=summary(results, judged, undecided, tokens)
            + _schedule_summary(played, fuzzed)
            + "".join(map(control.control_sentence, controls.values()))
            + unseen(context),
            findings=findings,
            metrics={
                "tokens": tokens,
                "cells": {unit: cell.as_json() for unit, cell in judged.items()},
                "layers": {unit: result["layers"] for unit, result in results.items() if result.get("layers")},
                "schedules": {result["schedule"]: len(result["requests"]) for result in played.values()},
                "fuzzed": {unit: result["steps"] for unit, result in fuzzed.items()},
                "replays": {unit: result["replay"] for unit, result in fuzzed.items() if result["replay"]},
            },
            tables=[cell_table(results, judged), flip_table(results), *_schedule_tables(played, fuzzed)],
            plots=[position_plot(results), ratio_plot(judged), flip_plot(results), *layer_plots(results, judged)],
        )


def unseen(context: Context) -> str:
    """What this target does not let the gate see, for the summary."""
    lacking = [
        what
        for capability, what in (
            (Capability.READ_STATE, "caches (they cannot be read)"),
            (Capability.READ_BOUNDARIES, "the curve by layer (what passes between layers cannot be read)"),
            (Capability.RANKS, "another number of ranks (the floor is another batch composition alone)"),
        )
        if capability not in context.target.capabilities
    ]
    return f"; not judged on target {context.target.name!r}: {', '.join(lacking)}" if lacking else ""


def _schedule_arms(context: Context) -> tuple[ArmConfig, ArmConfig, ArmConfig]:
    """Baseline, candidate and floor of the schedules: FP8 cache, one rank, two for the floor where there are ranks."""
    ranks = 2 if Capability.RANKS in context.target.capabilities else 1

    def arm(config: ArmConfig, tensor_parallel: int) -> ArmConfig:
        fp8 = {"kv_cache_dtype": "fp8", "max_context": 2 * TEXT_LENGTH, "max_batch": TEXTS}
        return replace(config, tensor_parallel=tensor_parallel, context_parallel=1, **fp8)  # type: ignore[arg-type]

    return arm(context.baseline, 1), arm(context.candidate, 1), arm(context.baseline, ranks)


def _measure_schedule(unit: Unit, context: Context) -> dict[str, Json]:
    texts = windows(context.target, TEXTS, TEXT_LENGTH, unit_seed(context.seed, unit.id))
    arms = Arms(*(context.target.open(config) for config in _schedule_arms(context)))
    return {
        "schedule": unit.params["schedule"],
        **measure_schedules(arms, SCENARIOS[unit.params["schedule"]](texts), texts),
    }


def _schedule_tables(played: Mapping[str, Mapping[str, Json]], fuzzed: Mapping[str, Mapping[str, Json]]) -> list[Table]:
    return [*([schedule_table(played)] if played else []), *([fuzz_table(fuzzed)] if fuzzed else [])]


def _schedule_summary(played: Mapping[str, Mapping[str, Json]], fuzzed: Mapping[str, Mapping[str, Json]]) -> str:
    broken = [result["schedule"] for unit, result in played.items() if any(schedule_findings(unit, result))]
    said = f"; {len(played)} schedules, " + (f"broken: {', '.join(broken)}" if broken else "none broken")
    steps, failing = sum(r["steps"] for r in fuzzed.values()), sum(bool(r["findings"]) for r in fuzzed.values())
    random = f"; {steps} steps of random schedules, " + (
        f"{failing} of {len(fuzzed)} units broken" if failing else "none broken"
    )
    return (said if played else "") + (random if fuzzed else "")


def _units(settings: Mapping[str, Json]) -> list[Unit]:
    """The costliest last, which processes start first: the largest batches."""
    return [
        *(Unit(name, {"control": name}) for name in settings.get("controls", [])),
        *fuzz_units(settings),
        *(Unit(f"schedule-{name}", {"schedule": name}) for name in settings.get("schedules", [])),
        *cell_units(settings),
    ]
