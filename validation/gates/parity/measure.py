"""Measuring parity: baseline, candidate and differently batched baseline, teacher-forced in lockstep on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evals.text import load
from numerics.logits import LogitStats, LogitSummary
from validation.gates.parity.layers import LayerCurve, curves
from validation.targets.base import OWN_PATH, Arm, ArmConfig, Capability, ForcedDecode, ForcedStep, Target, TargetError
from validation.targets.optional import Verifying, expect

KL_RESOLUTION = 1e-8
"""Nats added to a token's KL before its logarithm: logits are BF16, and one ULP on one of them moves KL by more."""

STATE_KINDS = ("state", "conv", "latent")
"""Caches that are compared after the last token: recurrent state, convolution window, latent rows."""


Undecided = Callable[[Sequence[float], Sequence[float]], bool]
"""Whether log KL by sequence, of the candidate and of the floor, leaves a cell without a decision."""


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


def other_ranks(ranks: int) -> int:
    """Another tensor parallelism: each all-reduce then rounds other partial sums."""
    return ranks // 2 if ranks > 1 else 2


def own_path_asked(target: Target, baseline: ArmConfig, candidate: ArmConfig) -> bool:
    """Whether the candidate must have run a path of its own. Two engines or servers may be compared as they are."""
    elsewhere = Capability.RUN_OP not in target.capabilities
    return not elsewhere or candidate.decode_backend != baseline.decode_backend


@dataclass(frozen=True)
class Arms:
    """The arms of one cell. `floor` is a baseline too, with other rank counts where the target has ranks."""

    baseline: Arm
    candidate: Arm
    floor: Arm


@dataclass
class _Seen:
    """What was seen of one arm's distance from the baseline: logits, and the caches of each finished sequence."""

    readable: Sequence[str]
    logits: LogitStats = field(default_factory=LogitStats)
    caches: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in STATE_KINDS})
    layers: LayerCurve = field(default_factory=LayerCurve)

    def add_step(self, reference: ForcedStep, logits: Tensor, boundaries: Mapping[str, Tensor]) -> None:
        self.logits.add(reference.logits, logits)
        self.layers.add(reference.boundaries, boundaries)

    def add_caches(self, reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
        for kind in self.readable:
            names = [name for name in reference if name.endswith(f".{kind}")]
            if not names:
                # A model without such layers has no such cache.
                continue
            self.caches[kind].append(relative_rms([(reference[name], other[name]) for name in names]))


def measure_parity(
    arms: Arms,
    sequences: Sequence[Sequence[int]],
    batch: int,
    prompt_length: int,
    caches: Sequence[str] = STATE_KINDS,
    drafts: int = 0,
    reserve: Sequence[Sequence[int]] = (),
    undecided: Undecided = lambda candidate, floor: False,
) -> dict[str, Any]:
    """Decode all sequences in groups of `batch`, baseline, candidate and floor side by side; plain JSON statistics.

    Those in `reserve` are decoded too where the others leave the question `undecided`: a second look.

    No logits are kept: each step's are reduced to a few figures per token at once. `caches` are the kinds that the
    arms let be read. With `drafts` the candidate runs verify steps, another number of drafts right in each; baseline
    and floor decode token by token all the same.
    """
    seen = {"candidate": _Seen(caches), "floor": _Seen(caches)}
    before = arms.candidate.counters()
    steps, decoded = len(sequences[0]) - prompt_length, len(sequences)
    elsewhere = _compare(arms, sequences, batch, prompt_length, seen, drafts)
    if reserve and undecided(*(_log_kl(one, batch, steps) for one in seen.values())):
        elsewhere += _compare(arms, reserve, batch, prompt_length, seen, drafts)
        decoded += len(reserve)
    after = arms.candidate.counters()
    return {
        "tokens": decoded * steps,
        "sequences": decoded,
        "looks": 2 if reserve else 1,
        "paths": _difference(after.steps, before.steps),
        "fallbacks": _difference(after.fallbacks, before.fallbacks),
        "elsewhere": elsewhere,
        **{arm: _figures(one, batch, steps) for arm, one in seen.items()},
        "layers": curves(seen["candidate"].layers, seen["floor"].layers),
    }


def _compare(
    arms: Arms,
    sequences: Sequence[Sequence[int]],
    batch: int,
    prompt_length: int,
    seen: Mapping[str, _Seen],
    drafts: int,
) -> int:
    """Decode the sequences and add what is seen of them. Rows of the candidate that its own path did not compute."""
    groups = [sequences[first : first + batch] for first in range(0, len(sequences), batch)]
    # A single sequence needs company for its other composition; the one before it (cyclically) will do.
    companies = [[*group, sequences[i - 1]] if batch == 1 else group for i, group in enumerate(groups)]
    parts = other_composition(batch)
    split = [[company[i] for i in part] for company in companies for part in parts]
    for arm, members in ((arms.baseline, groups), (arms.floor, split), (arms.candidate, groups)):
        expect(arm, [(group, prompt_length) for group in members])
    return sum(
        _compare_group(arms, group, company, prompt_length, seen, drafts)
        for group, company in zip(groups, companies, strict=True)
    )


def _compare_group(
    arms: Arms,
    group: Sequence[Sequence[int]],
    company: Sequence[Sequence[int]],
    prompt_length: int,
    seen: Mapping[str, _Seen],
    drafts: int,
) -> int:
    """Rows of the candidate that its own path did not compute."""
    batch, elsewhere = len(group), 0
    with ExitStack() as open_decodes:

        def start(arm: Arm, members: Sequence[Sequence[int]], drafts: int = 0) -> ForcedDecode:
            given = members, prompt_length
            decode = _verify_decode(arm, *given, drafts) if drafts else arm.forced_decode(*given)
            open_decodes.callback(decode.close)
            return decode

        reference, judged = start(arms.baseline, group), start(arms.candidate, group, drafts)
        parts = other_composition(batch)
        floors = [start(arms.floor, [company[i] for i in part]) for part in parts]
        for exact, own, *others in zip(reference, judged, *floors, strict=True):
            elsewhere += len(own.logits) * (own.path != OWN_PATH)
            seen["candidate"].add_step(exact, own.logits, own.boundaries)
            joined = {name: torch.cat([step.boundaries[name] for step in others])[:batch] for name in exact.boundaries}
            seen["floor"].add_step(exact, torch.cat([step.logits for step in others])[:batch], joined)
        place = {
            member: (decode, index)
            for part, decode in zip(parts, floors, strict=True)
            for index, member in enumerate(part)
        }
        for sequence in range(batch if seen["candidate"].readable else 0):
            caches, (decode, index) = reference.state(sequence), place[sequence]
            seen["candidate"].add_caches(caches, judged.state(sequence))
            seen["floor"].add_caches(caches, decode.state(index))
    return elsewhere


def accepted_in_turn(drafts: int) -> tuple[int, ...]:
    """How many drafts are right in each verify step: every number of them, many and few in turn."""
    few_and_many = [count for i in range(drafts + 1) for count in (drafts - i, i)]
    return tuple(few_and_many[: drafts + 1])


def _verify_decode(arm: Arm, sequences: Sequence[Sequence[int]], prompt_length: int, drafts: int) -> ForcedDecode:
    if not isinstance(arm, Verifying):
        raise TargetError(f"arm {arm.config.name} cannot run verify steps over given tokens")
    return arm.verify_decode(sequences, prompt_length, drafts, accepted_in_turn(drafts))


def relative_rms(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """RMS of the difference over RMS of the reference, all pairs (reference, other) together."""
    difference = sum(float((other.double() - exact.double()).square().sum()) for exact, other in pairs)
    size = sum(float(exact.double().square().sum()) for exact, _ in pairs)
    if not size:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / size)


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def _figures(seen: _Seen, batch: int, steps: int) -> dict[str, Any]:
    """Summary, KL by sequence and by position, caches. Tokens were added group by group, step by step, row by row."""
    kl = _kl(seen, batch, steps)
    return {
        "kl_by_sequence": kl.mean(1).flatten().tolist(),
        "log_kl_by_sequence": _log_kl(seen, batch, steps),
        "kl_by_position": kl.mean((0, 2)).tolist(),
        "caches": seen.caches,
        "summary": _summary(seen.logits.summary()),
    }


def _kl(seen: _Seen, batch: int, steps: int) -> Tensor:
    return seen.logits.per_token()["kl"].view(-1, steps, batch)


def _log_kl(seen: _Seen, batch: int, steps: int) -> list[float]:
    """Mean log KL of every sequence."""
    logs: list[float] = (_kl(seen, batch, steps) + KL_RESOLUTION).log().mean(1).flatten().tolist()
    return logs


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
