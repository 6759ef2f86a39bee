"""The decision on paired answers: validity first, then non-inferiority with three outcomes, for each eval and for all.

Pure: `judge_samples` does not care who produced the samples, and renders nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evals import statistics
from evals.draws import repeating, unlike
from evals.graded import Fate, Pair, paired
from evals.samples import ARMS, Request, Sample
from evals.statistics import Evidence, Outcome
from evals.tasks import EvalTask
from evals.validity import counts, echoed, insensitive, problems

FLIP = 0.5
"""A pair whose scores differ by this much is a flip."""


@dataclass(frozen=True)
class JudgeSettings:
    """What is allowed, and with which certainty.

    `margins` maps a task to the damage that would be tolerated, in score points (0.02 is two of a hundred). `looks`
    are the shares of the planned answers at which one looked so far, this look last: (1.0,) without looks between.
    """

    margins: Mapping[str, float]
    alpha: float = 0.05
    power: float = 0.8
    seed: int = 0
    looks: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Decision:
    """The bounds of a damage against its margin. `p` is that the damage is beyond the margin, `adjusted` after Holm.

    `damage` and `lower` are of the pairs that both arms answered. For `upper` an error of the candidate alone is a lost
    answer: it may hide one.
    """

    outcome: Outcome
    damage: float
    lower: float
    upper: float
    margin: float
    p: float
    adjusted: float = 1.0
    p_change: float = 1.0
    adjusted_change: float = 1.0


@dataclass(frozen=True)
class Design:
    """What this many answers can decide, were the arms equal: always said, whatever the decision.

    `repeats_needed` is None where no number of repeats would do. `aa_no_go` is the share of NO-GO among A/A runs made
    from these very answers.
    """

    power: float
    detectable: float
    repeats_needed: int | None
    aa_no_go: float


@dataclass(frozen=True)
class TaskJudgement:
    """Everything about one eval. `invalid` has the reasons why nothing was decided; `decision` is None then."""

    task: EvalTask
    pairs: Sequence[Pair]
    invalid: Sequence[str]
    fates: Mapping[str, Mapping[Fate, int]]
    echoed: int
    means: Mapping[str, float]
    decision: Decision | None = None
    design: Design | None = None

    @property
    def outcome(self) -> Outcome:
        """UNDECIDED where the answers are not valid."""
        return self.decision.outcome if self.decision else Outcome.UNDECIDED

    @property
    def scored(self) -> Sequence[Pair]:
        """Pairs that count: those that both arms answered."""
        return [pair for pair in self.pairs if pair.answered]

    @property
    def unanswered(self) -> Sequence[Pair]:
        """Pairs that the candidate alone did not answer."""
        return [pair for pair in self.pairs if _lost_to_an_error(pair)]

    @property
    def repeating(self) -> Sequence[str]:
        """Arms whose repeats are one answer, so that an item's pairs count as one."""
        return repeating(self.pairs)

    @property
    def flips(self) -> Sequence[Pair]:
        """Pairs that changed sides, lost ones first."""
        moved = [pair for pair in self.scored if abs(pair.damage) >= FLIP]
        return sorted(moved, key=lambda pair: -pair.damage)

    @property
    def repeats(self) -> int:
        """Repeats of the item that has most."""
        return max((pair.request.repeat + 1 for pair in self.pairs), default=0)


@dataclass(frozen=True)
class Judgement:
    """All evals, and the pooled decision over those that are valid (None below two)."""

    tasks: Mapping[str, TaskJudgement]
    pooled: Decision | None
    settings: JudgeSettings

    @property
    def outcome(self) -> Outcome:
        """NO-GO if any decision is, GO only if every eval's is."""
        outcomes = [task.outcome for task in self.tasks.values()]
        if Outcome.NO_GO in outcomes or (self.pooled and self.pooled.outcome is Outcome.NO_GO):
            return Outcome.NO_GO
        return Outcome.GO if outcomes and set(outcomes) == {Outcome.GO} else Outcome.UNDECIDED


def judge_samples(
    samples: Sequence[Sample], tasks: Sequence[EvalTask], settings: JudgeSettings, planned: Sequence[Request] = ()
) -> Judgement:
    """Judge the samples of both arms; an eval that lacks answers to a question of `planned` is not valid.

    Every eval must be GO on its own, which needs no correction; a NO-GO of any would stop a release, so those are
    corrected after Holm over the evals and the pooled decision.

    Raises:
        ValueError: a sample of no task here, a sample twice, or a task without a margin.
    """
    names = {task.name for task in tasks}
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.request.task not in names:
            raise ValueError(f"sample {sample.key}: tasks here are {', '.join(sorted(names))}")
        by_task[sample.request.task].append(sample)
    alpha = statistics.level_at(settings.looks, settings.alpha)
    settings = replace(settings, alpha=alpha)
    asked = {name: [request for request in planned if request.task == name] for name in names}
    judged = {task.name: _judge_task(task, by_task[task.name], settings, asked[task.name]) for task in tasks}
    return _corrected(judged, settings)


def item_damages(pairs: Sequence[Pair]) -> list[list[float]]:
    """Damage of every pair, item by item in order."""
    items: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        items[pair.request.item].append(pair.damage)
    return list(items.values())


def evidence_of(pairs: Sequence[Pair]) -> Evidence:
    """Item means as evidence; repeats of an item are one pair where an arm repeats one answer."""
    means = _item_means(pairs)
    return statistics.evidence(means, len(means) if repeating(pairs) else len(pairs))


def worst_evidence_of(pairs: Sequence[Pair]) -> Evidence:
    """As `evidence_of` all pairs that both arms answered, errors of the candidate alone being lost answers."""
    return evidence_of([pair for pair in pairs if pair.answered or _lost_to_an_error(pair)])


def _lost_to_an_error(pair: Pair) -> bool:
    return pair.candidate.fate is Fate.ERROR and pair.baseline.fate is not Fate.ERROR


def _judge_task(
    task: EvalTask, samples: Sequence[Sample], settings: JudgeSettings, planned: Sequence[Request]
) -> TaskJudgement:
    if task.name not in settings.margins:
        raise ValueError(f"task {task.name} has no margin; give one above 0")
    margin = settings.margins[task.name]
    found = paired(task, samples)
    judged = TaskJudgement(
        task=task,
        pairs=found.pairs,
        invalid=problems(found, margin, task.max_tokens, planned),
        fates=counts(found.pairs),
        echoed=echoed(found.pairs),
        means={},
    )
    scored = judged.scored
    invalid = judged.invalid or [*insensitive(scored, margin, task.kind.chance), *unlike(scored)]
    if judged.invalid or not scored:
        return replace(judged, invalid=invalid)
    seen = evidence_of(scored)
    decision = _decide(seen, worst_evidence_of(found.pairs), margin, settings)
    if invalid and decision.outcome is not Outcome.NO_GO:
        return replace(judged, invalid=invalid)
    means = {arm: sum(pair.arm(arm).grade.score for pair in scored) / len(scored) for arm in ARMS}
    return replace(judged, means=means, decision=decision, design=_design(scored, seen, margin, settings))


def _decide(seen: Evidence, worst: Evidence, margin: float, settings: JudgeSettings) -> Decision:
    upper = max(float(statistics.upper_bound(evidence, settings.alpha)) for evidence in (seen, worst))
    outcome = statistics.decide(seen, margin, settings.alpha)
    return Decision(
        outcome=Outcome.UNDECIDED if outcome is Outcome.GO and upper > margin else outcome,
        damage=float(seen.mean),
        lower=float(statistics.lower_bound(seen, settings.alpha)),
        upper=upper,
        margin=margin,
        p=statistics.p_beyond(seen, margin),
    )


def _design(pairs: Sequence[Pair], seen: Evidence, margin: float, settings: JudgeSettings) -> Design:
    # Where repeats are one answer, an item is asked once, and no repeat adds to that.
    once = bool(repeating(pairs))
    damages = [[mean] for mean in _item_means(pairs)] if once else item_damages(pairs)
    noise = statistics.noise(damages)
    planned = replace(seen, variance=max(seen.variance, seen.step**2), jump=noise.jump)
    return Design(
        power=statistics.chances(planned, margin, settings.alpha).go,
        detectable=statistics.minimum_detectable(planned, settings.alpha, settings.power),
        repeats_needed=None
        if once
        else statistics.repeats_needed(noise, len(damages), margin, settings.alpha, settings.power),
        aa_no_go=statistics.aa_rates(damages, margin, settings.alpha, settings.seed)[Outcome.NO_GO],
    )


def _corrected(judged: Mapping[str, TaskJudgement], settings: JudgeSettings) -> Judgement:
    """The pooled decision, and Holm over it and all others; a NO-GO that Holm does not carry is undecided."""
    valid = {name: task for name, task in judged.items() if task.decision}
    pooled = None
    decisions: list[Decision] = []
    changes: list[float] = []
    for task in valid.values():
        assert task.decision is not None
        decisions.append(task.decision)
        changes.append(statistics.permutation_worse(_item_means(task.scored), settings.seed))
    if len(valid) > 1:
        seen = statistics.pooled([evidence_of(task.scored) for task in valid.values()])
        worst = statistics.pooled([worst_evidence_of(task.pairs) for task in valid.values()])
        margin = sum(decision.margin for decision in decisions) / len(decisions)
        pooled = _decide(seen, worst, margin, settings)
        decisions.append(pooled)
        means = [_item_means(task.scored) for task in valid.values()]
        changes.append(statistics.pooled_permutation_worse(means, settings.seed))
    final = [
        replace(
            decision,
            adjusted=adjusted,
            p_change=change,
            adjusted_change=adjusted_change,
            outcome=Outcome.UNDECIDED
            if decision.outcome is Outcome.NO_GO and adjusted > settings.alpha
            else decision.outcome,
        )
        for decision, adjusted, change, adjusted_change in zip(
            decisions,
            statistics.holm([decision.p for decision in decisions]),
            changes,
            statistics.holm(changes),
            strict=True,
        )
    ]
    tasks = {**judged, **{n: replace(t, decision=d) for (n, t), d in zip(valid.items(), final, strict=False)}}
    return Judgement(tasks, final[-1] if pooled else None, settings)


def _item_means(pairs: Sequence[Pair]) -> list[float]:
    return [sum(d) / len(d) for d in item_damages(pairs)]
