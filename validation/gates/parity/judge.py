"""The parity gate's decision on one cell of its matrix, with the allowances and their reasons.

Candidate and floor are both distances from the same baseline decode, so they are compared pairwise, by sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.statistics import Interval, bootstrap_mean
from validation.gates.base import Finding, Json
from validation.gates.parity.measure import KL_RESOLUTION, STATE_KINDS
from validation.targets.base import OWN_PATH, counted

TYPICAL_MULTIPLE = 2.5
"""Allowed typical KL (geometric mean over tokens) in floors.

KL grows with the square of the logits' difference. Two roundings of the baseline with error e each are sqrt(2) e apart;
the numerics gate allows an op twice that error, so a candidate may be sqrt(1 + 2^2) e away: (1 + 4) / (1 + 1) = 2.5."""

CACHE_MULTIPLE = math.sqrt(TYPICAL_MULTIPLE)
"""Allowed relative RMS difference of a cache in floors: the same allowance, in amplitude."""

TAIL_MULTIPLE = 4 * TYPICAL_MULTIPLE
"""Allowed mean KL in floors. Single tokens on which a near-tied expert changes sides rule a mean over few sequences:
valid roundings of the baseline were seen 2 floors apart in mean where their typical KL agreed within a quarter."""

ALPHA = 0.05
"""One-sided error rate of the tests, shared out over the cells (Bonferroni)."""

FLIP_SIGMAS = 12.0
"""A flip needs two logits to move by the margin between them: six RMS each is beyond any noise of this size."""


@dataclass(frozen=True)
class CellJudgement:
    """The judgement of one cell. Ratios are in floors, with one-sided bounds; None where nothing could be compared.

    `blind` where the floor is below the resolution: two roundings of the baseline give the same logits, as with a head
    of zeros, so the logits would not show a wrong candidate either.
    """

    kl: float
    floor: float
    typical: Interval | None = None
    caches: Mapping[str, Interval] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    blind: bool = False

    @property
    def undecided(self) -> bool:
        """Nothing wrong was proven, but the typical KL was not shown to be within its allowance either."""
        if self.findings or self.typical is None:
            return False
        return self.blind or self.typical.upper > TYPICAL_MULTIPLE

    @property
    def ratio(self) -> float:
        """Typical KL in floors; infinity where nothing could be compared."""
        return self.typical.mean if self.typical else math.inf

    def as_json(self) -> dict[str, Json]:
        return {
            "kl": self.kl,
            "floor_kl": self.floor,
            "typical_ratio": vars(self.typical) if self.typical else None,
            "cache_ratio": {kind: vars(interval) for kind, interval in self.caches.items()},
        }


def judge_cell(unit: str, result: Mapping[str, Any], seed: int, cells_in_all: int) -> CellJudgement:
    """Judge one cell: the candidate's path ran, everything is finite, KL and caches are within their multiples."""
    candidate, floor = result["candidate"], result["floor"]
    kl, noise = candidate["summary"]["kl"]["mean"], floor["summary"]["kl"]["mean"]
    broken = [*path_findings(unit, result), *_nonfinite_findings(unit, result)]
    if broken:
        return CellJudgement(kl, noise, findings=broken)
    alpha = alpha_of(cells_in_all, result.get("looks", 1))
    typical = _ratio(candidate["log_kl_by_sequence"], floor["log_kl_by_sequence"], alpha, seed)
    caches = {
        kind: _ratio(_logarithms(candidate["caches"][kind]), _logarithms(floor["caches"][kind]), alpha, seed)
        for kind in STATE_KINDS
        if candidate["caches"][kind]
    }
    findings = [
        *_typical_findings(unit, typical, caches),
        *_tail_findings(unit, candidate, floor, alpha, seed),
        *_flip_findings(unit, candidate["summary"], floor["summary"]),
    ]
    log_floor = floor["log_kl_by_sequence"]
    blind = math.exp(sum(log_floor) / len(log_floor)) < _BLIND * KL_RESOLUTION
    return CellJudgement(kl, noise, typical, caches, findings, blind)


def alpha_of(cells_in_all: int, looks: int) -> float:
    """A cell's share of the error rate, shared once more where it may be looked at twice (Bonferroni, both times)."""
    return ALPHA / cells_in_all / looks


def leaves_open(logs: Sequence[float], floor_logs: Sequence[float], alpha: float, seed: int) -> bool:
    """Whether more sequences are worth decoding: typical KL was shown to be neither within nor beyond its allowance."""
    if not all(map(math.isfinite, (*logs, *floor_logs))):
        return False
    typical = _ratio(logs, floor_logs, alpha, seed)
    return typical.lower <= TYPICAL_MULTIPLE < typical.upper


def _ratio(logs: Sequence[float], floor_logs: Sequence[float], alpha: float, seed: int) -> Interval:
    """Geometric mean ratio of paired figures given as logarithms, with its bounds."""
    log = bootstrap_mean([a - b for a, b in zip(logs, floor_logs, strict=True)], alpha, seed)
    return Interval(math.exp(log.mean), math.exp(log.lower), math.exp(log.upper), alpha, log.n)


_BLIND = 2.0
"""A floor of no KL at all has the resolution itself as its typical KL; an honest one is hundreds of times that."""

_CACHE_RESOLUTION = 2.0**-9
"""Relative difference added to a cache's before its logarithm: half a ULP of BF16. The first layer's caches have no
noise in the floor, while an honest candidate may skip one such rounding there."""


def _logarithms(figures: Sequence[float]) -> list[float]:
    return [math.log(figure + _CACHE_RESOLUTION) for figure in figures]


def path_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """Unless both arms were asked for one backend, the candidate must have run its own."""
    if result.get("own_path", True) and not result["paths"].get(OWN_PATH):
        reasons = counted(result["fallbacks"]) or "it is not on"
        yield Finding("plan", f"{unit}: the candidate ran no specialised step ({reasons}); nothing was judged", unit)
    elif result.get("own_path", True) and result.get("elsewhere"):
        # A prompt runs generic; every row that is judged is one of decode, and has no reason to.
        reasons = ", ".join(f"{reason}: {n} steps" for reason, n in sorted(result["fallbacks"].items()))
        rows = f"{result['elsewhere']} of {result['tokens']} rows that were judged"
        yield Finding("plan", f"{unit}: {rows} are none of the candidate's own path ({reasons})", unit)


def _nonfinite_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    for arm in ("candidate", "floor"):
        summary = result[arm]["summary"]
        rows = summary["candidate_nonfinite"] + summary["reference_nonfinite"]
        if rows:
            yield Finding("logits", f"{unit}: {rows} of {result['tokens']} rows hold NaN or infinity ({arm})", unit)
        for kind, figures in result[arm]["caches"].items():
            lost = sum(not math.isfinite(figure) for figure in figures)
            if lost:
                message = f"{kind} cache of {lost} sequences holds NaN or infinity, or nothing ({arm})"
                yield Finding(f"{kind} cache", f"{unit}: {message}", unit)


def _typical_findings(unit: str, typical: Interval, caches: Mapping[str, Interval]) -> Iterator[Finding]:
    if typical.lower > TYPICAL_MULTIPLE:
        yield Finding("logits", f"{unit}: typical KL is {_floors(typical, TYPICAL_MULTIPLE)}", unit)
    for kind, ratio in caches.items():
        if ratio.lower > CACHE_MULTIPLE:
            yield Finding(f"{kind} cache", f"{unit}: {kind} cache differs by {_floors(ratio, CACHE_MULTIPLE)}", unit)


def _floors(ratio: Interval, allowed: float) -> str:
    bounds = f"at least {ratio.lower:.3g} with {1 - ratio.alpha:.2%} confidence, n = {ratio.n} sequences"
    return f"{ratio.mean:.3g} floors ({bounds}), allowed {allowed:.3g}"


def _tail_findings(
    unit: str, candidate: Mapping[str, Any], floor: Mapping[str, Any], alpha: float, seed: int
) -> Iterator[Finding]:
    pairs = zip(candidate["kl_by_sequence"], floor["kl_by_sequence"], strict=True)
    excess = bootstrap_mean([kl - TAIL_MULTIPLE * (noise + KL_RESOLUTION) for kl, noise in pairs], alpha, seed)
    if excess.lower > 0:
        kl, noise = candidate["summary"]["kl"]["mean"], floor["summary"]["kl"]["mean"]
        message = f"mean KL is {kl:.3g} nats, the floor's {noise:.3g}, allowed {TAIL_MULTIPLE:.3g} floors"
        yield Finding("logits", f"{unit}: {message} (n = {excess.n} sequences)", unit)


def _flip_findings(unit: str, candidate: Mapping[str, Any], floor: Mapping[str, Any]) -> Iterator[Finding]:
    limit = FLIP_SIGMAS * CACHE_MULTIPLE * floor["logit_rms"]["max"]
    wild = sum(b["flips"] for b in candidate["flips"] if b["low"] >= limit)
    if wild:
        yield Finding("logits", f"{unit}: {wild} top-1 flips at margins of {limit:.3g} logits and more", unit)
