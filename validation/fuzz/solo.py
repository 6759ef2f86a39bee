"""What requests are compared with: every text decoded alone by the baseline, and how far apart two roundings of it are.

A request that is given its tokens sees, at every place, what its text sees alone: one decode of each text is the solo
run of every request there can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numerics.logits import centred_logit_rms
from validation.fuzz.texts import TEXT_LENGTH
from validation.gates.parity.measure import STATE_KINDS, relative_rms
from validation.targets.base import Arm, ArmConfig, Capability, Target
from validation.targets.schedule import Run, Schedule, Submit

Caches = Mapping[str, Tensor]


@dataclass(frozen=True)
class Solo:
    """One text alone. `logits[i]` f32 [V] predicts token i + 1; `caches[n]` are those after n tokens, n >= 1."""

    logits: Tensor
    caches: Mapping[int, Caches]


@dataclass(frozen=True)
class Reference:
    """Solo runs of all texts, and the noise: the largest differences that another number of ranks makes."""

    texts: Sequence[Sequence[int]]
    solos: Sequence[Solo]
    logit_floor: float
    cache_floor: Mapping[str, float]


def reference(target: Target, baseline: ArmConfig, texts: Sequence[Sequence[int]]) -> Reference:
    """Decode every text in the baseline twice: on one rank, and for the noise on two where there are ranks."""
    ranks = 2 if Capability.RANKS in target.capabilities else 1
    solos = _solos(target.open(baseline), texts)
    others = _solos(target.open(replace(baseline, tensor_parallel=ranks, context_parallel=1)), texts)
    pairs = list(zip(solos, others, strict=True))
    return Reference(
        texts,
        solos,
        max(float(centred_logit_rms(a.logits, b.logits).max()) for a, b in pairs),
        {
            kind: max(distance(a.caches[n], b.caches[n], kind) for a, b in pairs for n in a.caches)
            for kind in STATE_KINDS
        },
    )


def distance(exact: Caches, other: Caches, kind: str) -> float:
    """Relative RMS difference of one kind of cache over all layers; infinity where one is missing or of other size."""
    names = [name for name in exact if name.endswith(f".{kind}")]
    if any(name not in other or other[name].shape != exact[name].shape for name in names):
        return float("inf")
    return relative_rms([(exact[name], other[name]) for name in names])


def _solos(arm: Arm, texts: Sequence[Sequence[int]]) -> list[Solo]:
    """The texts in one batch, token by token. The first token's logits and caches come from requests of one token."""
    firsts = [_first(arm, text) for text in texts]
    logits = [[first.logits[0]] for first in firsts]
    caches: list[dict[int, Caches]] = [{1: first.caches[1]} for first in firsts]
    decode = arm.forced_decode([list(text) for text in texts], 1)
    try:
        for step in decode:
            for i, row in zip(step.sequences, step.logits, strict=True):
                logits[i].append(row)
                caches[i][step.positions[0] + 1] = decode.state(i)
    finally:
        decode.close()
    return [Solo(torch.stack(rows), own) for rows, own in zip(logits, caches, strict=True)]


def _first(arm: Arm, text: Sequence[int]) -> Solo:
    options = Schedule((Submit("first", (text[0],), (text[1],)), Run()), max_batch=1)
    trace = arm.generate(options).traces["first"]
    return Solo(trace.logits, {1: trace.after_prompt})


def fuzz_config(config: ArmConfig) -> ArmConfig:
    """The arm as the fuzzer runs it: an FP8 cache on one rank, with room for the longest request."""
    return replace(
        config,
        kv_cache_dtype="fp8",
        tensor_parallel=1,
        context_parallel=1,
        max_context=TEXT_LENGTH,
        max_batch=8,
        drafts=0,
    )
