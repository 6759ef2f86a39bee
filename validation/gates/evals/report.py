"""What the evals gate says and shows. Every number was decided by `evals.judge`; nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.breakdown import by_length
from evals.graded import INVALID, Fate, Pair
from evals.judge import Decision, Judgement, TaskJudgement
from evals.samples import ARMS
from evals.statistics import Outcome, mcnemar
from validation.gates.base import Finding, GateResult, Plot, Table
from validation.gates.evals.breakdown import breakdowns, flips, points
from validation.verdict import Verdict

_VERDICTS = {Outcome.GO: Verdict.PASS, Outcome.NO_GO: Verdict.FAIL, Outcome.UNDECIDED: Verdict.INCONCLUSIVE}

POOLED = "all, pooled"


def result(gate: str, judged: Judgement, broken: Sequence[Finding] = (), more: Sequence[Table] = ()) -> GateResult:
    """The gate's result; `broken` are findings that make any score worthless, `more` tables of who made the answers."""
    verdict = Verdict.FAIL if broken else _VERDICTS[judged.outcome]
    findings = [*broken, *(finding for task in judged.tasks.values() for finding in _findings(task, judged))]
    if judged.pooled and judged.pooled.outcome is Outcome.NO_GO:
        findings.append(Finding(POOLED, _beyond(judged.pooled)))
    tasks = list(judged.tasks.values())
    tables = [scores(judged), designs(judged), tests(judged), validity(tasks), *more]
    tables += [table for task in tasks if task.decision for table in breakdowns(task, judged)]
    tables += [flips(task) for task in tasks if task.decision and task.flips]
    return GateResult(
        gate=gate,
        verdict=verdict,
        summary=summary(judged, broken),
        findings=findings,
        metrics={name: _metrics(task) for name, task in judged.tasks.items()},
        tables=tables,
        plots=[_plot(task, judged) for task in tasks if task.decision],
    )


def summary(judged: Judgement, broken: Sequence[Finding]) -> str:
    """One line: each eval's bound against its margin, or why it has none."""
    if broken:
        return broken[0].message
    return "; ".join(_line(name, task) for name, task in judged.tasks.items())


def _line(name: str, task: TaskJudgement) -> str:
    if not task.decision or not task.design:
        return f"{name}: not valid ({task.invalid[0]})"
    decision, n = task.decision, len(task.scored)
    counted = f"n = {n}{_repeated(task)}{_errors(task)}"
    said = f"{name}: damage {points(decision.damage)}, at most {points(decision.upper)} points ({counted})"
    margin = f"the margin of {points(decision.margin).lstrip('+')}"
    if decision.outcome is Outcome.GO:
        return f"{said}, within {margin}"
    if decision.outcome is Outcome.NO_GO:
        return f"{said}, beyond {margin}"
    return f"{said}, undecided at {margin} ({_needed(task)})"


def _repeated(task: TaskJudgement) -> str:
    """Whose repeats are one answer, so that the items count and not the pairs."""
    return f"; repeats of the {' and '.join(task.repeating)} are one answer, so items count" if task.repeating else ""


def _errors(task: TaskJudgement) -> str:
    """How many errors of the candidate alone the upper bound holds for lost answers."""
    return f"; {len(task.unanswered)} errors of the candidate alone count as lost" if task.unanswered else ""


def _needed(task: TaskJudgement) -> str:
    assert task.design is not None
    if task.repeating:
        return "repeats are one answer: more items are needed"
    if task.design.repeats_needed is None:
        return "items differ too much for any number of repeats: more items are needed"
    return f"equal arms need {task.design.repeats_needed} repeats, this were {task.repeats}"


def _findings(task: TaskJudgement, judged: Judgement) -> Iterator[Finding]:
    name = task.task.name
    for reason in task.invalid:
        yield Finding(name, f"not valid: {reason}", name)
    if task.decision and task.decision.outcome is Outcome.NO_GO:
        yield Finding(name, _beyond(task.decision), name)
    if task.decision and task.decision.outcome is Outcome.UNDECIDED:
        bounds = f"between {points(task.decision.lower)} and {points(task.decision.upper)} points"
        yield Finding(name, f"undecided: the damage is {bounds}{_errors(task)}; {_needed(task)}", name)


def _beyond(decision: Decision) -> str:
    return (
        f"damage of {points(decision.damage)} points, at least {points(decision.lower)}; allowed are "
        f"{points(decision.margin).lstrip('+')} (p = {decision.p:.2g}, after Holm {decision.adjusted:.2g})"
    )


def scores(judged: Judgement) -> Table:
    """Scores of both arms, and the damage's bounds against the margin."""
    rows: list[list[str | int | float]] = []
    for name, task in judged.tasks.items():
        shared: list[str | int | float] = [name, task.task.source, len(task.task.items), task.repeats]
        means = [f"{task.means[arm]:.1%}" if task.means else "-" for arm in ARMS]
        rows.append([*shared, len(task.scored), *means, *_bounds(task.decision)])
    if judged.pooled:
        rows.append([POOLED, "", "", "", "", "", "", *_bounds(judged.pooled)])
    header = ["eval", "items from", "items", "repeats", "pairs", *ARMS, "damage", "at least", "at most", "margin"]
    caption = (
        "Damage: baseline less candidate, in points of a hundred, items' means over repeats, with one-sided "
        f"{1 - judged.settings.alpha:.1%} bounds. GO: at most the margin. NO-GO: at least more than the margin."
    )
    return Table("Evals", [*header, "outcome"], rows, caption, brief=True)


def _bounds(decision: Decision | None) -> list[str]:
    if decision is None:
        return ["-", "-", "-", "-", "not valid"]
    shown = [points(value) for value in (decision.damage, decision.lower, decision.upper)]
    return [*shown, points(decision.margin).lstrip("+"), decision.outcome.value]


def designs(judged: Judgement) -> Table:
    """What the answers can decide."""
    rows: list[list[str | int | float]] = []
    for name, task in judged.tasks.items():
        if not task.design or not task.decision:
            continue
        design = task.design
        needed = "more items" if design.repeats_needed is None else design.repeats_needed
        effect = points(design.detectable).lstrip("+")
        margin = points(task.decision.margin).lstrip("+")
        rows.append([name, margin, f"{design.power:.0%}", effect, task.repeats, needed, f"{design.aa_no_go:.1%}"])
    header = ["eval", "margin", "power", "detectable", "repeats", "repeats needed", "A/A NO-GO"]
    caption = (
        "Power: chance that equal arms are GO. Detectable: the smallest margin, in points, at which that chance is "
        f"{judged.settings.power:.0%}. Needed: the repeats that give it at this margin. A/A: NO-GO among 2,000 runs of "
        "equal arms made from these answers."
    )
    return Table("What this many answers can decide", header, rows, caption, brief=True)


def tests(judged: Judgement) -> Table:
    """p-values, alone and after Holm."""
    rows: list[list[str | int | float]] = []
    decided = [(name, task.decision, task.scored) for name, task in judged.tasks.items() if task.decision]
    pooled: list[tuple[str, Decision, Sequence[Pair]]] = [(POOLED, judged.pooled, ())] if judged.pooled else []
    for name, decision, pairs in [*decided, *pooled]:
        assert decision is not None
        lost, gained = (sum(sign * pair.damage > 0 for pair in pairs) for sign in (1, -1))
        exact = f"{mcnemar(lost, gained):.2g}" if pairs and _single(pairs) else "-"
        p = [decision.p_change, decision.adjusted_change, decision.p, decision.adjusted]
        rows.append([name, lost if pairs else "", gained if pairs else "", *(f"{value:.2g}" for value in p), exact])
    header = ["eval", "lost", "gained", "p any damage", "Holm", "p beyond margin", "Holm ", "McNemar"]
    caption = (
        "Any damage: sign permutation of items' means, one-sided. McNemar: exact, two-sided, where every item was "
        "asked once and scored 0 or 1. p-values above 0.5 are given as 0.5 in the column beyond margin."
    )
    return Table("Tests", header, rows, caption)


def _single(pairs: Sequence[Pair]) -> bool:
    once = len({pair.request.item for pair in pairs}) == len(pairs)
    return once and all(abs(pair.damage) in (0.0, 1.0) for pair in pairs)


def validity(tasks: Sequence[TaskJudgement]) -> Table:
    """What became of the answers."""
    rows: list[list[str | int | float]] = []
    for task in tasks:
        for arm in ARMS:
            fates = [task.fates[arm].get(fate, 0) for fate in (Fate.OK, *INVALID)]
            rows.append([task.task.name, arm, *fates, task.task.max_tokens, task.echoed])
    header = ["eval", "arm", *(fate.value for fate in (Fate.OK, *INVALID)), "cap (tokens)", "parameters echoed"]
    caption = (
        "Answers by what became of them; a wrong answer is ok here. Errors are left out of scores, in pairs; those of "
        "the candidate alone count as lost answers in the upper bound."
    )
    return Table("Validity", header, rows, caption)


def steps_table(paths: Mapping[str, int], fallbacks: Mapping[str, int]) -> Table:
    """By which path the candidate's steps ran, and why those that fell back did."""
    rows: list[list[str | int | float]] = [[path, n] for path, n in sorted(paths.items())]
    rows += [[f"fell back: {why}", n] for why, n in sorted(fallbacks.items())]
    return Table("Steps of the candidate", ["path", "steps"], rows, "A step is one run of the model over a batch.")


def _plot(task: TaskJudgement, judged: Judgement) -> Plot:
    rows = by_length(task.scored, judged.settings.alpha, judged.settings.seed)
    series: dict[str, Sequence[float | None]] = {arm: [row.score[arm] for row in rows] for arm in ARMS}
    caption = f"n = {len(task.scored)} pairs"
    labels = [row.label for row in rows]
    return Plot(f"Score by output length, {task.task.name}", "bar", labels, series, "tokens", "mean score", caption)


def _metrics(task: TaskJudgement) -> dict[str, Any]:
    """What a history of runs compares."""
    found: dict[str, Any] = {"digest": task.task.digest, "pairs": len(task.scored), "invalid": list(task.invalid)}
    if task.decision and task.design:
        found |= {**task.means, "damage": task.decision.damage, "upper": task.decision.upper}
        found |= {"outcome": task.decision.outcome.value, "power": task.design.power}
        found |= {"detectable": task.design.detectable, "repeats_needed": task.design.repeats_needed}
    return found
