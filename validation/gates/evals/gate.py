"""Gate 5, evals: is the candidate's accuracy within the margin of the baseline's?

Both arms answer the same questions with the same seeds. The answers must be valid first; then the damage's bounds
decide against each eval's margin. `evals.judge` decides, whoever produced the answers.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evals.judge import JudgeSettings, judge_samples
from evals.samples import Request, Sample, plan_requests
from evals.tasks import DataError
from validation.gates.base import Context, Finding, GateResult, Json, Unit
from validation.gates.evals.measure import ask_both, prompt_of
from validation.gates.evals.report import result, steps_table
from validation.gates.evals.settings import OPTIONAL, RULES, Planned, planned, unknown_names
from validation.gates.settings import problems
from validation.targets.base import OWN_PATH, ArmConfig, Capability, counted


class EvalsGate:
    """Paired evals with non-inferiority margins."""

    name = "evals"
    layer = 5
    question = "Is the accuracy of the answers within the margin of the baseline's?"
    needs: frozenset[Capability] = frozenset()
    units_alone = False
    """A score is that of all answers: no unit can be judged by itself."""

    cost = "two answers to every question; half a minute in small, minutes to decide two points, hours to decide one"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Where the items come from, how they are asked, and each eval's items, repeats and margin."""
        return problems(settings, RULES, optional=OPTIONAL) or unknown_names(settings)

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Baseline and candidate, with room for the longest prompt of each eval and its answer."""
        if not {Capability.GENERATE, Capability.CONVERSE} & context.target.capabilities:
            raise ValueError(f"target {context.target.name!r} can neither generate nor answer chats")
        try:
            plans = planned(context)
        except DataError as error:
            raise ValueError(str(error)) from None
        if any(plan.drafts for plan in plans) and not _takes_drafts(context):
            raise ValueError(f"target {context.target.name!r} has no drafts; set drafts = 0 in the profile")
        return [arm for plan in plans for arm in _arms(context, plan)]

    def plan(self, context: Context) -> Sequence[Unit]:
        """Batches of questions, eval by eval."""
        size = context.settings["batch"]
        return [
            Unit(f"{plan.task.name}-{start // size:04d}", {"eval": plan.task.name, "start": start})
            for plan in planned(context)
            for start in range(0, len(plan.task.items) * plan.repeats, size)
        ]

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Both arms' answers to one batch."""
        plan = next(plan for plan in planned(context) if plan.task.name == unit.params["eval"])
        size, start = context.settings["batch"], unit.params["start"]
        requests = _requests(context, plan)[start : start + size]
        return ask_both(context, requests, _arms(context, plan), size, start)

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """Valid answers, and every eval's damage within its margin."""
        plans = planned(context)
        samples = [Sample.model_validate(entry) for unit in results.values() for entry in unit["samples"]]
        settings = JudgeSettings({plan.task.name: plan.margin for plan in plans}, seed=_seed(context, "judge"))
        asked = [request for plan in plans for request in _requests(context, plan)]
        judged = judge_samples(samples, [plan.task for plan in plans], settings, asked)
        steps = steps_table(_steps(results, "paths"), _steps(results, "fallbacks"))
        return result(self.name, judged, _not_its_path(results, context), [steps])


def _takes_drafts(context: Context) -> bool:
    return bool({Capability.DRAFTS, Capability.CONVERSE} & context.target.capabilities)


def _requests(context: Context, plan: Planned) -> list[Request]:
    """Item by item, so that a batch shares its prompts, which an engine with cached prefixes runs once."""
    place = {item: i for i, item in enumerate(plan.task.item_ids)}
    return sorted(plan_requests([plan.task], plan.repeats, context.seed), key=lambda r: (place[r.item], r.repeat))


def _arms(context: Context, plan: Planned) -> tuple[ArmConfig, ArmConfig]:
    settings = context.settings
    options = {
        "max_batch": settings["batch"],
        "drafts": plan.drafts,
        "kv_cache_dtype": settings["kv_cache_dtype"],
    }
    if Capability.CONVERSE not in context.target.capabilities:
        longest = max(len(prompt_of(context.target, request)) for request in _requests(context, plan))
        options["max_context"] = longest + plan.task.max_tokens
    else:
        options = {}  # A server was started as it was; what it is compared as is the profile's to say.
    return replace(context.baseline, **options), replace(context.candidate, **options)


def _steps(results: Mapping[str, dict[str, Json]], kind: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for measured in results.values():
        total.update(measured[kind])
    return total


def _not_its_path(results: Mapping[str, dict[str, Json]], context: Context) -> list[Finding]:
    """The candidate decoded by the generic path alone, so its answers say nothing about its own.

    An engine's steps fall back one by one, as they should. A server that shows no sign any more was started otherwise.
    """
    same = context.candidate.decode_backend == context.baseline.decode_backend
    paths, fallbacks = _steps(results, "paths"), _steps(results, "fallbacks")
    lost = fallbacks.total() if Capability.CONVERSE in context.target.capabilities else 0
    if same or not results or (paths[OWN_PATH] and not lost):
        return []
    reasons = counted(fallbacks) or "it is not on"
    if paths[OWN_PATH]:
        said = (
            f"{lost} of {paths.total()} answers of the candidate are not of its own path ({reasons}); start a new run"
        )
        return [Finding("plan", said)]
    return [Finding("plan", f"the candidate ran no specialised step ({reasons}); nothing was judged")]


def _seed(context: Context, what: str) -> int:
    return context.seed * 2**32 + zlib.crc32(what.encode())
