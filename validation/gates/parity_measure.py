"""Measuring parity: baseline, candidate and differently batched baseline, teacher-forced in lockstep on text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evals.text import load
from numerics.logits import LogitStats, LogitSummary
from validation.targets.base import Arm, ForcedDecode, Target

STATE_KINDS = ("state", "conv", "latent")
"""Caches that are compared after the last token: recurrent state, convolution window, latent rows."""


def windows(target: Target, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` windows of `length` tokens from the held-out documents, prose and code in turn, at seeded places.

    Raises:
        ValueError: no document has that many tokens.
    """
    texts = [target.tokens(document.text) for document in load("heldout")]
    long_enough = [tokens for tokens in texts if len(tokens) >= length]
    if not long_enough:
        raise ValueError(f"no held-out document has {length} tokens")
    places = np.random.default_rng(seed)
    chosen = (long_enough[i % len(long_enough)] for i in range(count))
    return [
        tokens[start : start + length]
        for tokens in chosen
        for start in [int(places.integers(len(tokens) - length + 1))]
    ]


def other_composition(batch: int) -> list[list[int]]:
    """Another way to batch the same sequences: two halves, or for a single one in company of a second."""
    if batch == 1:
        return [[0, 1]]
    return [list(range(batch // 2)), list(range(batch // 2, batch))]


@dataclass
class _Pooled:
    """Squared difference and squared size of a cache, summed over layers and sequences."""

    difference: float = 0.0
    size: float = 0.0

    def add(self, reference: Tensor, other: Tensor) -> None:
        self.difference += float((other.double() - reference.double()).square().sum())
        self.size += float(reference.double().square().sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self.difference / self.size) if self.size else math.inf


def measure_parity(
    baseline: Arm, candidate: Arm, sequences: Sequence[Sequence[int]], batch: int, prompt_length: int
) -> dict[str, Any]:
    """Decode all sequences in groups of `batch`, both arms and the floor side by side; plain JSON statistics.

    No logits are kept: each step's are reduced to a few figures per token at once.
    """
    stats = {"candidate": LogitStats(), "floor": LogitStats()}
    caches = {arm: {kind: _Pooled() for kind in STATE_KINDS} for arm in stats}
    before = candidate.counters()
    for first in range(0, len(sequences), batch):
        group = sequences[first : first + batch]
        # A single sequence needs company for its other composition; the one before it (cyclically) will do.
        company = [*group, sequences[first - 1]] if batch == 1 else group
        _compare_group(baseline, candidate, group, company, prompt_length, stats, caches)
    steps = len(sequences[0]) - prompt_length
    after = candidate.counters()
    return {
        "tokens": len(sequences) * steps,
        "sequences": len(sequences),
        "paths": _difference(after.steps, before.steps),
        "fallbacks": _difference(after.fallbacks, before.fallbacks),
        "caches": {arm: {kind: pooled.relative for kind, pooled in kinds.items()} for arm, kinds in caches.items()},
        **{arm: _figures(stat, batch, steps) for arm, stat in stats.items()},
    }


def _compare_group(
    baseline: Arm,
    candidate: Arm,
    group: Sequence[Sequence[int]],
    company: Sequence[Sequence[int]],
    prompt_length: int,
    stats: Mapping[str, LogitStats],
    caches: Mapping[str, Mapping[str, _Pooled]],
) -> None:
    batch = len(group)
    with ExitStack() as open_decodes:

        def start(arm: Arm, members: Sequence[Sequence[int]]) -> ForcedDecode:
            decode = arm.forced_decode(members, prompt_length)
            open_decodes.callback(decode.close)
            return decode

        reference, judged = start(baseline, group), start(candidate, group)
        parts = other_composition(batch)
        floors = [start(baseline, [company[i] for i in part]) for part in parts]
        for steps in zip(_logits(reference), _logits(judged), *map(_logits, floors), strict=True):
            exact, other = steps[:2]
            stats["candidate"].add(exact, other)
            stats["floor"].add(exact, torch.cat(steps[2:])[:batch])
        place = {
            member: (decode, i) for part, decode in zip(parts, floors, strict=True) for i, member in enumerate(part)
        }
        for sequence in range(batch):
            decode, index = place[sequence]
            _compare_caches(reference.state(sequence), judged.state(sequence), caches["candidate"])
            _compare_caches(reference.state(sequence), decode.state(index), caches["floor"])


def _logits(decode: ForcedDecode) -> Iterator[Tensor]:
    return (step.logits for step in decode)


def _compare_caches(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], pooled: Mapping[str, _Pooled]
) -> None:
    for name, tensor in reference.items():
        pooled[name.rsplit(".", 1)[1]].add(tensor, other[name])


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def _figures(stats: LogitStats, batch: int, steps: int) -> dict[str, Any]:
    """Summary, and KL by sequence and by position. Tokens were added group by group, step by step, row by row."""
    summary = stats.summary()
    kl = stats.per_token()["kl"].view(-1, steps, batch)
    return {
        "kl_by_sequence": kl.mean(1).flatten().tolist(),
        "kl_by_position": kl.mean((0, 2)).tolist(),
        "summary": _summary(summary),
    }


def _summary(summary: LogitSummary) -> dict[str, Any]:
    distributions = {name: getattr(summary, name) for name in ("kl", "reverse_kl", "logit_rms")}
    return {
        "judged": summary.judged,
        "reference_nonfinite": summary.reference_nonfinite,
        "candidate_nonfinite": summary.candidate_nonfinite,
        "overlap": summary.overlap,
        "flips": [{"low": b.low, "tokens": b.tokens, "flips": b.flips} for b in summary.flips],
        **{name: vars(distribution) for name, distribution in distributions.items()},
    }
