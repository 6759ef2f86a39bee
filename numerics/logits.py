"""How far two distributions over the vocabulary are apart: KL, top-1 flips by margin, top-k overlap, logit
error.

Functions take logits [..., V] of any floating dtype and work in FP64. `LogitStats` accumulates them over
batches. A candidate row with a NaN or an infinity is infinitely far away; a reference row with one cannot
be judged, gives NaN and is counted apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN_EDGES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Edges of the margin bins, in logits. The first is one BF16 step of a logit between 16 and 32: a flip
below it can come from rounding the logits alone."""

ROWS_AT_ONCE = 32
"""Rows taken to FP64 together: 32 rows of 163,840 logits are 42 MB a tensor."""


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats of the softmax distributions, float64 [...], by FP64 log-sum-exp; never below 0."""
    log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    # Rounding can leave a sum of about -1e-16 for equal rows; clamp keeps NaN.
    kl = kl.clamp(min=0.0)
    kl = torch.where(_finite_rows(q_logits), kl, math.inf)
    return torch.where(_finite_rows(p_logits), kl, math.nan)


def top1_margin(logits: Tensor) -> Tensor:
    """Gap between the largest and the second largest logit, float64 [...]; 0 is an exact tie."""
    first, second = logits.double().topk(2, dim=-1).values.unbind(-1)
    return first - second


def top1_flipped(reference: Tensor, candidate: Tensor) -> Tensor:
    """Whether greedy decoding would emit another token, bool [...]; among equal logits the lowest id wins."""
    return (reference.argmax(-1) != candidate.argmax(-1)) | ~_finite_rows(candidate)


def topk_overlap(reference: Tensor, candidate: Tensor, k: int) -> Tensor:
    """Share of the k largest that both have, float64 [...]; tokens that tie with the k-th count as
    included."""
    in_reference = reference >= reference.topk(k, dim=-1).values[..., -1:]
    in_candidate = candidate >= candidate.topk(k, dim=-1).values[..., -1:]
    return (in_reference & in_candidate).sum(-1).clamp(max=k).double() / k


def centred_logit_rms(reference: Tensor, candidate: Tensor) -> Tensor:
    """RMS over the vocabulary of the logit difference after removing its mean (softmax ignores it),
    float64 [...]."""
    difference = candidate.double() - reference.double()
    rms = (difference - difference.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    rms = torch.where(_finite_rows(candidate), rms, math.inf)
    return torch.where(_finite_rows(reference), rms, math.nan)


@dataclass(frozen=True)
class Distribution:
    """Summary of one figure over tokens."""

    mean: float
    p50: float
    p99: float
    p999: float
    max: float


@dataclass(frozen=True)
class MarginBin:
    """Top-1 flips among the tokens whose reference margin lies in [low, high) logits."""

    low: float
    high: float
    tokens: int
    flips: int


@dataclass(frozen=True)
class LogitSummary:
    """What `LogitStats` has seen. `judged` = tokens with a finite reference row; all figures are over
    those."""

    tokens: int
    judged: int
    reference_nonfinite: int
    candidate_nonfinite: int
    kl: Distribution
    """KL(reference || candidate), nats."""
    reverse_kl: Distribution
    """KL(candidate || reference), nats."""
    logit_rms: Distribution
    flips: tuple[MarginBin, ...]
    overlap: float
    """Mean top-k overlap."""

    @property
    def flip_rate(self) -> float:
        return sum(b.flips for b in self.flips) / self.judged


class LogitStats:
    """Accumulates reference and candidate logits, batch by batch; keeps three scalars per token and no
    logits.

    The per-token figures stay in the order they were added, so that a caller can bootstrap over prompts.
    """

    def __init__(self, top_k: int = 10, margin_edges: tuple[float, ...] = MARGIN_EDGES) -> None:
        if list(margin_edges) != sorted(set(margin_edges)) or not margin_edges or margin_edges[0] <= 0:
            raise ValueError(f"margin edges must rise from above 0, got {margin_edges}")
        self.top_k = top_k
        self.margin_edges = margin_edges
        self._scalars: list[Tensor] = []
        self._overlap = 0.0
        self._reference_nonfinite = 0
        self._candidate_nonfinite = 0
        self._binned = torch.zeros(2, len(margin_edges) + 1, dtype=torch.int64)

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        """Add logits [..., V] of the same tokens in both arms.

        Raises ValueError if the shapes differ or the vocabulary is smaller than `top_k`.
        """
        if reference.shape != candidate.shape:
            raise ValueError(f"logits differ in shape: {tuple(reference.shape)} and {tuple(candidate.shape)}")
        if reference.shape[-1] < self.top_k:
            raise ValueError(f"top-{self.top_k} overlap needs as many logits, got {reference.shape[-1]}")
        reference, candidate = (x.detach().reshape(-1, x.shape[-1]) for x in (reference, candidate))
        for start in range(0, reference.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            self._add_rows(reference[rows].double(), candidate[rows].double())

    def _add_rows(self, reference: Tensor, candidate: Tensor) -> None:
        judged = _finite_rows(reference)
        self._reference_nonfinite += int((~judged).sum())
        self._candidate_nonfinite += int((~_finite_rows(candidate)).sum())
        kl, reverse = kl_divergence(reference, candidate), kl_divergence(candidate, reference)
        # Seen from the candidate a broken candidate row is its own reference; here it is infinitely far away.
        reverse = torch.where(judged, reverse.nan_to_num(nan=math.inf, posinf=math.inf), math.nan)
        scalars = torch.stack([kl, reverse, centred_logit_rms(reference, candidate)])
        self._scalars.append(scalars.cpu())
        reference, candidate = reference[judged], candidate[judged]
        edges = torch.tensor(self.margin_edges, dtype=torch.float64, device=reference.device)
        bins = torch.bucketize(top1_margin(reference), edges, right=True)
        flipped = top1_flipped(reference, candidate)
        for row, chosen in enumerate((bins, bins[flipped])):
            self._binned[row] += torch.bincount(chosen, minlength=len(self.margin_edges) + 1).cpu()
        whole = _finite_rows(candidate)
        self._overlap += float(topk_overlap(reference[whole], candidate[whole], self.top_k).sum())

    def merge(self, other: LogitStats) -> None:
        """Append what another accumulator with the same settings has seen."""
        if (self.top_k, self.margin_edges) != (other.top_k, other.margin_edges):
            raise ValueError("only accumulators with the same top_k and margin edges can be merged")
        self._scalars += other._scalars
        self._overlap += other._overlap
        self._reference_nonfinite += other._reference_nonfinite
        self._candidate_nonfinite += other._candidate_nonfinite
        self._binned += other._binned

    def per_token(self) -> dict[str, Tensor]:
        """`kl`, `reverse_kl` and `logit_rms`, each float64 [tokens], in the order added."""
        joined = torch.cat(self._scalars, dim=1) if self._scalars else torch.empty(3, 0, dtype=torch.float64)
        return {"kl": joined[0], "reverse_kl": joined[1], "logit_rms": joined[2]}

    def summary(self) -> LogitSummary:
        """Summarise. Raises ValueError if no token has a finite reference row."""
        scalars = self.per_token()
        tokens = scalars["kl"].numel()
        judged = tokens - self._reference_nonfinite
        if not judged:
            raise ValueError(f"none of {tokens} tokens has a finite reference row: nothing to judge")
        low, high = (0.0, *self.margin_edges), (*self.margin_edges, math.inf)
        return LogitSummary(
            tokens=tokens,
            judged=judged,
            reference_nonfinite=self._reference_nonfinite,
            candidate_nonfinite=self._candidate_nonfinite,
            kl=_distribution(scalars["kl"]),
            reverse_kl=_distribution(scalars["reverse_kl"]),
            logit_rms=_distribution(scalars["logit_rms"]),
            flips=tuple(map(MarginBin, low, high, *self._binned.tolist())),
            overlap=self._overlap / judged,
        )


def _finite_rows(logits: Tensor) -> Tensor:
    return logits.isfinite().all(-1)


def _distribution(values: Tensor) -> Distribution:
    """Summary over the values that are not NaN (tokens without a reference); infinities count in full."""
    ordered = values[~values.isnan()].sort().values
    last = ordered.numel() - 1
    # The next higher order statistic, not an interpolation: that would turn two infinities into a NaN.
    p50, p99, p999 = (float(ordered[math.ceil(share * last)]) for share in (0.5, 0.99, 0.999))
    return Distribution(float(ordered.mean()), p50, p99, p999, float(ordered[-1]))
