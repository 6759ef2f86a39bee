"""Gate 4, stability: do long answers of the candidate hold up as the baseline's do?

Chains of known right tokens and free text are answered at length by both arms, with drafts where the model has a
drafter, and by the baseline with other roundings (the floor). Rates are compared by exact paired tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from validation.gates.base import Context, Finding, GateResult, Json, Unit
from validation.gates.parity.measure import Arms, other_ranks, windows
from validation.gates.settings import at_least_zero, one_of, positive_integer, problems
from validation.gates.stability.judge import TaskJudgement, judge_drift, judge_task
from validation.gates.stability.measure import (
    Task,
    chains,
    free_text,
    measure_answers,
    measure_drift,
    second_half,
)
from validation.gates.stability.report import acceptance_plots, drift_plot, outcome_table, text_table
from validation.targets.base import ArmConfig, Capability
from validation.verdict import Verdict

TASKS = ("again", "text", "chains")
"""`again`: short chains, each asked a second time while its prompt is cached; the second answers are judged."""

UNITS = ("again", "text", "drift", "chains")
"""The tasks and the teacher-forced drift; what takes longest last, which is started first."""

_AGAIN, _AGAIN_TOKENS = 6, 45
"""Prompts of `again`: what a drafter lost with a prefix shows in the first tokens."""

_ROOM = 320
"""Places of a request beyond its answer: the prompt, and some room."""


class StabilityGate:
    """Long answers, paired by prompt and seed."""

    name = "stability"
    layer = 4
    question = "Do long answers hold up: right to the end, without loops or NaN, and with as many drafts accepted?"
    needs = frozenset({Capability.GENERATE, Capability.TEACHER_FORCED, Capability.FULL_LOGITS})
    cost = "three decodes of every prompt at length; a minute in small, an hour in full"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Counts and lengths of chains, texts and drift sequences; batch, drafts and cache format.

        Texts, of which few drafts are right, may have a batch and a number of drafts of their own.
        """
        return problems(
            settings,
            {
                "chains": positive_integer(10_000),
                "chain_tokens": positive_integer(100_000),
                "texts": positive_integer(10_000),
                "text_tokens": positive_integer(100_000),
                "drift_sequences": positive_integer(10_000),
                "drift_tokens": positive_integer(100_000),
                "batch": positive_integer(64),
                "drafts": at_least_zero(64),
                "text_batch": positive_integer(64),
                "text_drafts": at_least_zero(64),
                "kv_cache_dtype": one_of("bf16", "fp8"),
            },
            optional=("text_batch", "text_drafts"),
        )

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Baseline, candidate and floor of every task, and of the drift sequences."""
        settings = context.settings
        windows(context.target, 1, settings["drift_tokens"], context.seed)
        if (settings["drafts"] or settings.get("text_drafts")) and Capability.DRAFTS not in context.target.capabilities:
            raise ValueError(f"target {context.target.name!r} has no drafts; set drafts = 0 in the profile")
        for task in TASKS:
            _task(context, task, count=1)
        return [arm for unit in UNITS for arm in _arms(context, unit)]

    def plan(self, context: Context) -> Sequence[Unit]:
        """One unit per task, and the teacher-forced drift. Prompts are asked again where there is a drafter to lose."""
        return [Unit(name) for name in UNITS if name != "again" or context.settings["drafts"]]

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Answer the task's prompts in all three arms, or decode the drift sequences in lockstep."""
        settings = context.settings
        arms = Arms(*(context.target.open(config) for config in _arms(context, unit.id)))
        if unit.id == "drift":
            sequences = windows(
                context.target, settings["drift_sequences"], settings["drift_tokens"], _seed(context, unit.id)
            )
            return measure_drift(context.target, arms, sequences, prompt=_DRIFT_PROMPT)
        task = _task(context, unit.id)
        if unit.id == "again":
            # All at once: prefixes are cached for one call.
            return second_half(measure_answers(context.target, arms, task, len(task.asks)))
        return measure_answers(context.target, arms, task, _of_task(context, unit.id, "batch"))

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """All tasks within their allowances, and KL that does not grow along a text."""
        tasks = {unit: result for unit, result in results.items() if unit != "drift"}
        judged = {unit: judge_task(unit, result, _seed(context, unit)) for unit, result in tasks.items()}
        drift, quarters = (
            judge_drift("drift", results["drift"], _seed(context, "drift")) if "drift" in results else ([], [])
        )
        findings: list[Finding] = [f for task in judged.values() for f in task.findings] + drift
        undecided = [f"{unit}: {what}" for unit, task in judged.items() for what in task.undecided]
        verdict = Verdict.FAIL if findings or not results else Verdict.INCONCLUSIVE if undecided else Verdict.PASS
        shown = quarters[:-1]
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=_summary(tasks, judged, findings, undecided),
            findings=findings,
            metrics={
                "acceptance": {
                    unit: {place: column.rates() for place, column in task.acceptance.items()}
                    for unit, task in judged.items()
                },
                "drift_floors": [q.mean for q in shown],
            },
            tables=[outcome_table(tasks, judged), text_table(tasks)],
            plots=[*acceptance_plots(judged), *([drift_plot(shown, shown[0].n)] if shown else [])],
        )


_DRIFT_PROMPT = 32
"""Tokens prefilled before a drift sequence is decoded."""


def _task(context: Context, name: str, count: int | None = None) -> Task:
    settings, seed = context.settings, _seed(context, name)
    if name == "again":
        once = chains(context.target, count or _AGAIN, _AGAIN_TOKENS, seed)
        return Task([*once.asks, *(replace(ask, seed=ask.seed + len(once.asks)) for ask in once.asks)], once.right * 2)
    if name == "chains":
        return chains(context.target, count or settings["chains"], settings["chain_tokens"], seed)
    return free_text(context.target, count or settings["texts"], settings["text_tokens"], seed)


def _of_task(context: Context, task: str, name: str) -> int:
    """The task's own batch or number of drafts; the profile's for all where it has none."""
    settings = context.settings
    return int(settings.get(f"text_{name}", settings[name]) if task == "text" else settings[name])


def _arms(context: Context, unit: str) -> tuple[ArmConfig, ArmConfig, ArmConfig]:
    settings = context.settings
    if unit == "drift":
        options = {"max_batch": settings["drift_sequences"], "max_context": settings["drift_tokens"], "drafts": 0}
    else:
        lengths = {"chains": settings["chain_tokens"], "text": settings["text_tokens"], "again": _AGAIN_TOKENS}
        tokens = lengths[unit]
        batch, drafts = (_of_task(context, unit, name) for name in ("batch", "drafts"))
        options = {"max_batch": batch, "max_context": tokens + _ROOM, "drafts": drafts}
    options["kv_cache_dtype"] = settings["kv_cache_dtype"]
    baseline, candidate = (replace(arm, **options) for arm in (context.baseline, context.candidate))
    ranks = baseline.tensor_parallel
    floor_ranks = other_ranks(ranks) if Capability.RANKS in context.target.capabilities else ranks
    return baseline, candidate, replace(baseline, tensor_parallel=floor_ranks, context_parallel=1)


def _seed(context: Context, unit: str) -> int:
    return context.seed * 2**32 + zlib.crc32(unit.encode())


def _summary(
    tasks: Mapping[str, Mapping[str, Json]],
    judged: Mapping[str, TaskJudgement],
    findings: Sequence[Finding],
    undecided: Sequence[str],
) -> str:
    tokens = sum(f["tokens"] for result in tasks.values() for f in result["candidate"])
    prompts = sum(result["prompts"] for result in tasks.values())
    seen = f"{tokens} tokens in {prompts} answers"
    columns = [column for task in judged.values() for column in task.acceptance.values()]
    if columns:
        base, cand = (sum(getattr(c, arm) for c in columns) / len(columns) for arm in ("baseline", "candidate"))
        seen += f"; {cand:.2f} drafts accepted a step, the baseline {base:.2f}"
    if findings:
        return f"{seen}; {len(findings)} findings: " + ", ".join(sorted({finding.component for finding in findings}))
    if undecided:
        return f"{seen}; undecided: {', '.join(undecided)} (more prompts would decide)"
    return f"{seen}; all within allowance"
