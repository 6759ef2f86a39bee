"""The stability gate's decisions, each with its allowance and the reason for it. All comparisons pair by prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.statistics import Interval, bootstrap_mean, mcnemar_worse
from validation.gates.base import Finding
from validation.gates.parity.judge import ALPHA, CACHE_MULTIPLE, TYPICAL_MULTIPLE, path_findings
from validation.gates.stability.measure import BUCKET

ACCEPTANCE_MARGIN = 0.1
"""Allowed loss of accepted drafts, as a share of the baseline's. Valid roundings change a draft only where two are
nearly tied, some per cent of them; a tenth fewer accepted costs a user a tenth of the speed-up at most."""

ENTROPY_MARGIN = 0.1
"""Allowed shift of the mean entropy, as a share of the baseline's: a sampler that draws from another distribution, a
temperature off by a tenth included, moves it by more; texts that merely took another turn average out."""

NORM_RESOLUTION = 2.0**-9
"""Log ratio of state norms added to the floor's: half a ULP of BF16, the rounding of every input of the state."""

_TESTS_PER_TASK = 9
"""Tests that share one error rate within a task: four rates, the right share, two of entropy, acceptance, norms."""

_BLIND = 3.0
"""Allowed losses that the evidence must rule out: less would pass a loss three times the allowance unseen."""

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Accepted:
    """Drafts accepted a step in one context bucket: means over prompts, and candidate minus baseline, paired."""

    baseline: float
    candidate: float
    floor: float
    difference: Interval

    @property
    def allowed_loss(self) -> float:
        """A baseline that accepts next to none cannot lose much."""
        return max(ACCEPTANCE_MARGIN * self.baseline, 0.05)

    def rates(self) -> list[float]:
        """Baseline, candidate, floor."""
        return [self.baseline, self.candidate, self.floor]


@dataclass(frozen=True)
class TaskJudgement:
    """What was decided on one task. `rates` maps an outcome to (baseline, candidate, floor, lost, gained, p)."""

    findings: Sequence[Finding]
    undecided: Sequence[str] = ()
    rates: Mapping[str, tuple[int, int, int, int, int, float]] = field(default_factory=dict)
    acceptance: Mapping[str, Accepted] = field(default_factory=dict)


BAD: Mapping[str, Callable[[Figures], bool]] = {
    "loops": lambda figures: figures["loop_onset"] is not None,
    "token 0": lambda figures: figures["zero_tokens"] > 0,
    "cut off": lambda figures: figures["finish"] == "length",
    "wrong": lambda figures: figures["right"] < 1,
}
"""Bad outcomes of an answer. Token 0 is what the arg-max of a row without numbers points at. Free text has no right
answer, and is meant to end at its length."""


def judge_task(unit: str, result: Figures, seed: int) -> TaskJudgement:
    """Judge the answers of one task."""
    baseline, candidate, floor = result["baseline"], result["candidate"], result["floor"]
    broken = [*path_findings(unit, result), *_errors(unit, candidate, baseline)]
    if broken:
        return TaskJudgement(broken)
    alpha = ALPHA / _TESTS_PER_TASK
    judged = BAD if "right" in baseline[0] else ("loops", "token 0")
    rates = {name: _rate(name, baseline, candidate, floor) for name in judged}
    acceptance = _acceptance(baseline, candidate, floor, alpha, seed)
    findings = [
        Finding(name, f"{unit}: {_lost(name, rate, len(baseline))}", unit)
        for name, rate in rates.items()
        if rate[-1] < alpha
    ]
    findings += [
        *_right(unit, result, alpha, seed),
        *_entropy(unit, result, alpha, seed),
        *_norms(unit, result, alpha, seed),
    ]
    findings += [finding for bucket in acceptance if (finding := _slower(unit, bucket, acceptance[bucket]))]
    undecided = [
        f"acceptance from place {place}"
        for place, accepted in acceptance.items()
        # Sampled texts part for good at the first near-tied draw: their drafts are worth a proof of loss, not of none.
        if "right" in baseline[0] and accepted.difference.lower < -_BLIND * accepted.allowed_loss
    ]
    return TaskJudgement(findings, undecided if not findings else (), rates, acceptance)


def _errors(unit: str, candidate: Sequence[Figures], baseline: Sequence[Figures]) -> Iterator[Finding]:
    """NaN is no noise: one answer that ended in an error is enough."""
    failed = [figures["error"] for figures in candidate if figures["finish"] == "error"]
    if failed:
        yield Finding(
            "logits", f"{unit}: {len(failed)} of {len(candidate)} answers ended in an error: {failed[0]}", unit
        )
    misended = [figures["misended"] for figures in candidate if figures["misended"]]
    if misended:
        yield Finding(
            "end", f"{unit}: {len(misended)} of {len(candidate)} answers end wrongly: one {misended[0]}", unit
        )
    ill = sum(figures["finish"] == "error" for figures in baseline)
    if ill:
        yield Finding("logits", f"{unit}: {ill} of {len(baseline)} answers of the baseline ended in an error", unit)


def _rate(
    name: str, baseline: Sequence[Figures], candidate: Sequence[Figures], floor: Sequence[Figures]
) -> tuple[int, int, int, int, int, float]:
    bad = [[BAD[name](figures) for figures in arm] for arm in (baseline, candidate, floor)]
    lost = sum(c and not b for b, c in zip(bad[0], bad[1], strict=True))
    gained = sum(b and not c for b, c in zip(bad[0], bad[1], strict=True))
    return sum(bad[0]), sum(bad[1]), sum(bad[2]), lost, gained, mcnemar_worse(lost, gained)


def _lost(name: str, rate: tuple[int, int, int, int, int, float], n: int) -> str:
    base, cand, _, lost, gained, p = rate
    return f"{name}: {cand} of {n} answers, the baseline {base} ({lost} lost, {gained} gained, exact p = {p:.2g})"


def _right(unit: str, result: Figures, alpha: float, seed: int) -> Iterator[Finding]:
    """Right tokens lost beyond what another rounding of the baseline loses or gains."""
    if "right" not in result["baseline"][0]:
        return
    trios = zip(result["baseline"], result["candidate"], result["floor"], strict=True)
    excess = [b["right"] - c["right"] - abs(b["right"] - f["right"]) for b, c, f in trios]
    bound = bootstrap_mean(excess, alpha, seed)
    if bound.lower > 0:
        message = (
            f"{bound.mean:.1%} of the right tokens lost beyond the floor (at least {bound.lower:.1%}, n = {bound.n})"
        )
        yield Finding("right tokens", f"{unit}: {message}", unit)


def _entropy(unit: str, result: Figures, alpha: float, seed: int) -> Iterator[Finding]:
    """Sampled text only: along greedy text of a sure model entropy is next to nothing."""
    if "right" in result["baseline"][0]:
        return
    pairs = [
        (_mean(b["entropy"]), _mean(c["entropy"])) for b, c in zip(result["baseline"], result["candidate"], strict=True)
    ]
    usual = sum(b for b, _ in pairs) / len(pairs)
    shift = bootstrap_mean([c - b for b, c in pairs], alpha, seed)
    if shift.lower > ENTROPY_MARGIN * usual or shift.upper < -ENTROPY_MARGIN * usual:
        message = f"mean entropy shifted by {shift.mean:+.3g} nats from {usual:.3g}, allowed {ENTROPY_MARGIN:.0%}"
        yield Finding("entropy", f"{unit}: {message} (n = {shift.n})", unit)


def _norms(unit: str, result: Figures, alpha: float, seed: int) -> Iterator[Finding]:
    """State norms of prompts whose texts agree, at their largest distance from the baseline's."""
    if "right" not in result["baseline"][0]:
        return
    excess = []
    for b, c, f in zip(result["baseline"], result["candidate"], result["floor"], strict=True):
        if b["right"] == c["right"] == f["right"] == 1:
            excess.append(_norm_distance(b, c) - CACHE_MULTIPLE * (_norm_distance(b, f) + NORM_RESOLUTION))
    bound = bootstrap_mean(excess, alpha, seed) if excess else None
    if bound and bound.lower > 0:
        yield Finding("state", f"{unit}: state norms differ by {bound.mean:.2g} beyond the floor (n = {bound.n})", unit)


def _norm_distance(reference: Figures, other: Figures) -> float:
    """Largest |log ratio| of state norms at shared places; with other drafts accepted few places are shared."""
    norms = dict(map(tuple, reference["norms"]))
    shared = [(norms[place], norm) for place, norm in map(tuple, other["norms"]) if norms.get(place)]
    return max((abs(math.log(b / a)) if b > 0 else math.inf for a, b in shared), default=0.0)


def _acceptance(
    baseline: Sequence[Figures], candidate: Sequence[Figures], floor: Sequence[Figures], alpha: float, seed: int
) -> dict[str, Accepted]:
    """By context bucket: drafts accepted per step in baseline, candidate and floor, and the paired difference."""
    buckets = sorted({bucket for figures in baseline for bucket in figures["acceptance"]}, key=int)
    judged = {}
    for bucket in buckets:
        trios = [
            tuple(figures["acceptance"].get(bucket) for figures in trio)
            for trio in zip(baseline, candidate, floor, strict=True)
        ]
        rates = [tuple(accepted / steps for steps, accepted in trio) for trio in trios if all(trio)]
        if rates:
            base, cand, other = (sum(rate[i] for rate in rates) / len(rates) for i in range(3))
            difference = bootstrap_mean([rate[1] - rate[0] for rate in rates], alpha / len(buckets), seed)
            judged[str(int(bucket) * BUCKET)] = Accepted(base, cand, other, difference)
    return judged


def _slower(unit: str, place: str, accepted: Accepted) -> Finding | None:
    difference = accepted.difference
    if difference.upper >= -accepted.allowed_loss:
        return None
    message = (
        f"from place {place} {accepted.candidate:.2f} drafts accepted a step, the baseline {accepted.baseline:.2f}"
    )
    return Finding("drafter", f"{unit}: {message} (n = {difference.n} prompts)", unit)


def judge_drift(unit: str, result: Figures, seed: int) -> tuple[list[Finding], list[Interval]]:
    """KL in floors by quarter of a long text: none beyond its allowance, and no growth that the floor has not."""
    candidate, floor = result["candidate"], result["floor"]
    if candidate["nonfinite"] or floor["nonfinite"]:
        return [Finding("logits", f"{unit}: {candidate['nonfinite']} rows hold NaN or infinity", unit)], []
    if result["elsewhere"]:
        rows = f"{result['elsewhere']} of {result['tokens']} rows that were judged"
        return [Finding("plan", f"{unit}: {rows} are none of the candidate's own path", unit)], []
    logs = [
        [c - f for c, f in zip(of_candidate, of_floor, strict=True)]
        for of_candidate, of_floor in zip(candidate["log_kl"], floor["log_kl"], strict=True)
    ]
    alpha = ALPHA / (len(logs) + 1)
    quarters = [bootstrap_mean(quarter, alpha, seed) for quarter in logs]
    growth = bootstrap_mean([last - first for first, last in zip(logs[0], logs[-1], strict=True)], alpha, seed)
    allowed = math.log(TYPICAL_MULTIPLE)
    findings = [
        Finding("logits", f"{unit}: typical KL of quarter {i + 1} is {math.exp(q.mean):.3g} floors (n = {q.n})", unit)
        for i, q in enumerate(quarters)
        if q.lower > allowed
    ]
    if growth.lower > allowed:
        times = math.exp(growth.mean)
        findings.append(
            Finding("drift", f"{unit}: KL in floors grows {times:.3g}-fold from first to last quarter", unit)
        )
    return findings, [*quarters, growth]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
