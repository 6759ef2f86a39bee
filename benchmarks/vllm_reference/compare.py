"""How far two implementations are apart, in units of how far each is from itself: pure functions on logits and answers.

The yardstick is the parity gate's: the *typical* KL (geometric mean over tokens, paired by sequence), with the same
allowed multiple of the noise floor, for the same reason (`validation.gates.parity.judge.TYPICAL_MULTIPLE`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.vllm_reference.outputs import Answer
from evals.statistics import Interval, bootstrap_mean
from numerics.logits import LogitStats
from validation.gates.parity.judge import ALPHA, TYPICAL_MULTIPLE
from validation.gates.parity.measure import KL_RESOLUTION

SEED = 23

TIE = 0.125
"""Largest gap of the two best logits at which a greedy choice counts as a tie: one BF16 step of a logit between 16 and
32, the first edge of the margin bins too (`numerics.logits.MARGIN_EDGES`)."""


@dataclass(frozen=True)
class Distance:
    """Distance of one set of logits from a reference: KL(reference || other) in nats, and top-1 flips by margin."""

    tokens: int
    mean: float
    typical: float
    p99: float
    maximum: float
    logit_rms: float
    flips: Sequence[Mapping[str, float]]
    log_kl_by_sequence: Sequence[float]

    @property
    def flipped(self) -> int:
        """Tokens whose best token differs."""
        return int(sum(bin_["flips"] for bin_ in self.flips))


def distance(reference: Tensor, other: Tensor) -> Distance:
    """Compare logits [sequences, rows, vocab].

    Raises:
        ValueError: shapes differ, or a row of either holds NaN or infinity: nothing can be said then.
    """
    if not (reference.isfinite().all() and other.isfinite().all()):
        raise ValueError("logits hold NaN or infinity")
    stats = LogitStats()
    stats.add(reference, other)
    summary = stats.summary()
    logs = (stats.per_token()["kl"].view(reference.shape[:2]) + KL_RESOLUTION).log()
    return Distance(
        tokens=summary.tokens,
        mean=summary.kl.mean,
        typical=math.exp(float(logs.mean())),
        p99=summary.kl.p99,
        maximum=summary.kl.max,
        logit_rms=summary.logit_rms.mean,
        flips=[{"low": b.low, "tokens": b.tokens, "flips": b.flips} for b in summary.flips],
        log_kl_by_sequence=logs.mean(1).tolist(),
    )


def in_floors(judged: Distance, floor: Distance) -> Interval:
    """Typical KL of `judged` as a multiple of `floor`'s, with one-sided bounds over sequences."""
    pairs = zip(judged.log_kl_by_sequence, floor.log_kl_by_sequence, strict=True)
    log = bootstrap_mean([a - b for a, b in pairs], ALPHA, SEED)
    return Interval(math.exp(log.mean), math.exp(log.lower), math.exp(log.upper), log.alpha, log.n)


def widest(floors: Mapping[str, Distance]) -> str:
    """Name of the floor with the largest typical KL."""
    return max(floors, key=lambda name: floors[name].typical)


def verdict(ratio: Interval) -> str:
    """`within` where the typical KL is shown to be within the allowed multiple of the floor, `beyond` where it is shown
    not to be, else `undecided`."""
    if ratio.upper <= TYPICAL_MULTIPLE:
        return "within"
    return "beyond" if ratio.lower > TYPICAL_MULTIPLE else "undecided"


@dataclass(frozen=True)
class AnswerPair:
    """Two greedy answers to one question. `first_difference` is None where they are equal; `margins` (ours, theirs) and
    `chosen` are those of the step at which they part, up to which their inputs are the same."""

    kind: str
    tokens: int
    first_difference: int | None = None
    margins: tuple[float, float] = (math.inf, math.inf)
    chosen: tuple[int, int] = (-1, -1)

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def tied(self) -> bool:
        """Whether they part at a step where the smaller of the margins is a tie."""
        return not self.equal and min(self.margins) <= TIE


def pair_answers(kind: str, ours: Answer, theirs: Answer) -> AnswerPair:
    """Where two answers part; an answer that ends where the other goes on parts there too."""
    for step in range(max(len(ours.tokens), len(theirs.tokens))):
        a, b = (given.tokens[step] if step < len(given.tokens) else -1 for given in (ours, theirs))
        if a != b:
            margins = tuple(given.margin[step] if step < len(given.margin) else math.inf for given in (ours, theirs))
            return AnswerPair(kind, len(ours.tokens), step, (margins[0], margins[1]), (a, b))
    return AnswerPair(kind, len(ours.tokens))


def answer_verdict(pairs: Sequence[AnswerPair]) -> str:
    """`equal up to ties`, or how many part where neither implementation is near a tie."""
    wild = sum(not pair.equal and not pair.tied for pair in pairs)
    return f"{wild} of {len(pairs)} answers part away from a tie" if wild else "equal up to ties"


def compare_view(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], our_floors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """One view: their first composition against ours, and every floor.

    `ours` and `theirs` are by composition; `our_floors` are further decodes of ours (another number of ranks).
    """
    judged = distance(ours["first"], theirs["first"])
    floors = {name: distance(ours["first"], logits) for name, logits in our_floors.items()}
    if "second" in theirs:
        floors["theirs, another composition"] = distance(theirs["first"], theirs["second"])
    ratios = {name: in_floors(judged, floor) for name, floor in floors.items()}
    name = widest(floors)
    return {"judged": judged, "floors": floors, "ratios": ratios, "widest": name, "verdict": verdict(ratios[name])}
