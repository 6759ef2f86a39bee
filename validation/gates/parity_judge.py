"""The parity gate's decision on one cell of its matrix, with the allowances and their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.statistics import Interval, bootstrap_mean
from validation.gates.base import Finding, Json
from validation.gates.parity_measure import STATE_KINDS

AMPLITUDE_MULTIPLE = 3.0
"""How much further from the baseline the candidate's caches may be than the differently batched baseline's.

The numerics gate allows an op twice the baseline's error e against the exact result, so candidate and baseline may be
(2 + 1) e apart; two runs of the baseline are at least about e apart."""

KL_MULTIPLE = AMPLITUDE_MULTIPLE**2
"""KL grows with the square of the logits' difference."""

ALPHA = 0.05
"""One-sided error rate of the equivalence test, over the whole gate."""

FLIP_SIGMAS = 12.0
"""A flip needs two logits to move by the margin between them: six RMS each is beyond any noise of this size."""

KL_RESOLUTION = 1e-7
"""Nats below which a KL is nothing: logits are BF16, and one ULP at 8 on one of 320 tokens moves KL by more."""

_CACHE_RESOLUTION = 2.0**-12
"""Relative difference below which caches are equal: a fraction of what rounding them to BF16 costs (2^-9)."""


@dataclass(frozen=True)
class CellJudgement:
    """The judgement of one cell. `excess` bounds mean KL minus its allowance: above 0 is too much."""

    kl: float
    floor: float
    excess: Interval | None
    caches: Mapping[str, float]
    findings: Sequence[Finding]

    @property
    def ratio(self) -> float:
        """Candidate KL in floors."""
        return self.kl / self.floor if self.floor else float("inf") if self.kl else 0.0

    @property
    def undecided(self) -> bool:
        """Neither shown to be within the allowance nor beyond it."""
        return not self.findings and self.excess is not None and self.excess.upper > 0

    def as_json(self) -> dict[str, Json]:
        return {"kl": self.kl, "floor_kl": self.floor, "ratio": self.ratio, "cache_ratio": dict(self.caches)}


def judge_cell(unit: str, result: Mapping[str, Any], seed: int, cells_in_all: int) -> CellJudgement:
    """Judge one cell: the candidate's path ran, everything is finite, KL and caches are within their multiples."""
    candidate, floor = result["candidate"], result["floor"]
    caches = {
        kind: result["caches"]["candidate"][kind] / max(result["caches"]["floor"][kind], _CACHE_RESOLUTION)
        for kind in STATE_KINDS
    }
    findings = [*_path_findings(unit, result), *_nonfinite_findings(unit, result)]
    excess = None
    if not findings:
        # Bonferroni over cells: one cell's FAIL fails the gate.
        pairs = zip(candidate["kl_by_sequence"], floor["kl_by_sequence"], strict=True)
        differences = [kl - KL_MULTIPLE * noise - KL_RESOLUTION for kl, noise in pairs]
        excess = bootstrap_mean(differences, ALPHA / cells_in_all, seed)
        findings += _distance_findings(unit, result, excess, caches)
    kl, noise = candidate["summary"]["kl"]["mean"], floor["summary"]["kl"]["mean"]
    return CellJudgement(kl, noise, excess, caches, findings)


def _path_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    if not result["paths"].get("specialized"):
        reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(result["fallbacks"].items())) or "it is not on"
        yield Finding("plan", f"{unit}: the candidate ran no specialised step ({reasons}); nothing was judged", unit)


def _nonfinite_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    for arm in ("candidate", "floor"):
        summary = result[arm]["summary"]
        broken = summary["candidate_nonfinite"] + summary["reference_nonfinite"]
        if broken:
            yield Finding("logits", f"{unit}: {broken} rows of {summary['judged']} hold NaN or infinity ({arm})", unit)


def _distance_findings(
    unit: str, result: Mapping[str, Any], excess: Interval, caches: Mapping[str, float]
) -> Iterator[Finding]:
    candidate, floor = result["candidate"]["summary"], result["floor"]["summary"]
    kl, noise = candidate["kl"]["mean"], floor["kl"]["mean"]
    if excess.lower > 0:
        seen = f"{kl / noise:.3g} floors" if noise else "above a floor of 0"
        allowed = f"allowed {KL_MULTIPLE:.3g} (floor {noise:.3g}, n = {excess.n} sequences)"
        yield Finding("logits", f"{unit}: mean KL is {kl:.3g} nats, {seen}, {allowed}", unit)
    for kind, ratio in caches.items():
        if not ratio <= AMPLITUDE_MULTIPLE:
            seen = f"differs by {result['caches']['candidate'][kind]:.3g} (relative RMS), {ratio:.3g} floors"
            yield Finding(f"{kind} cache", f"{unit}: {kind} cache {seen}, allowed {AMPLITUDE_MULTIPLE:.3g}", unit)
    limit = FLIP_SIGMAS * AMPLITUDE_MULTIPLE * floor["logit_rms"]["max"]
    wild = sum(b["flips"] for b in candidate["flips"] if b["low"] >= limit)
    if wild:
        yield Finding("logits", f"{unit}: {wild} top-1 flips at margins of {limit:.3g} logits and more", unit)
