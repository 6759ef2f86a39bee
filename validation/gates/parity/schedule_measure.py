"""Measuring schedules: a request in company against the same request elsewhere, and the baseline's own noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numerics.logits import centred_logit_rms
from validation.errors import describe
from validation.gates.parity.measure import STATE_KINDS, Arms, relative_rms
from validation.gates.parity.schedules import Comparison
from validation.targets.base import Arm, TargetError
from validation.targets.schedule import Played, Schedule, Trace

FLOOR_PROMPT, FLOOR_TOKENS, FLOOR_SEQUENCES = 40, 12, 6
"""What the noise is measured on: as long as the requests of a scenario are."""


_WHEN = ("after_prompt", "at_end")
"""When a request's caches are compared."""


def measure_schedules(arms: Arms, comparisons: Sequence[Comparison], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Plain JSON: every compared request, what the candidate's engine broke or raised, and the noise."""
    played: dict[Schedule, Played] = {}
    requests: list[dict[str, Any]] = []
    broken: dict[str, int] = {}
    for number, comparison in enumerate(comparisons):
        try:
            for schedule in (*comparison.references, comparison.judged):
                if schedule not in played:
                    played[schedule] = _played(arms.candidate, schedule, broken)
            again = _played(arms.candidate, comparison.judged, broken) if comparison.again else None
        except TargetError:
            raise
        except Exception as error:
            # An engine that a schedule brings down is a wrong engine, not a broken gate.
            return {"requests": requests, "broken": broken, "raised": describe(error), "floor": {}}
        judged = again or played[comparison.judged]
        references = [played[schedule] for schedule in comparison.references]
        requests += [
            {"comparison": number, **_compare(comparison, name, judged, references)} for name in comparison.requests
        ]
    noisy = any(not comparison.exact for comparison in comparisons)
    return {"requests": requests, "broken": broken, "raised": "", "floor": noise(arms, texts) if noisy else {}}


def _played(arm: Arm, schedule: Schedule, broken: dict[str, int]) -> Played:
    """The schedule played; what it broke is added to `broken`."""
    played = arm.generate(schedule)
    for contract, count in played.broken.items():
        broken[contract] = broken.get(contract, 0) + count
    return played


def _compare(comparison: Comparison, name: str, played: Played, references: Sequence[Played]) -> dict[str, Any]:
    judged = played.traces[name]
    [reference] = [other.traces[name] for other in references if name in other.traces]
    figures: dict[str, Any] = {
        "request": name,
        "exact": comparison.exact,
        "error": judged.error or reference.error,
        "rows": len(reference.logits),
        "lost": abs(len(reference.logits) - len(judged.logits)),
        "unseen": [when for when in _WHEN if not (getattr(judged, when) and getattr(reference, when))],
    }
    if figures["lost"] or figures["error"]:
        return figures
    if comparison.exact:
        hashes = _hashes(judged, reference) if comparison.judged.hash_states else {}
        return {**figures, "differing": _differing(judged, reference), **hashes}
    return {
        **figures,
        "logit_rms": centred_logit_rms(reference.logits, judged.logits).tolist(),
        "caches": {when: _caches(getattr(reference, when), getattr(judged, when)) for when in _WHEN},
    }


def _differing(judged: Trace, reference: Trace) -> int:
    """Elements of logits and caches whose bits differ, or that only one of the two has."""
    differing = _bits(judged.logits, reference.logits)
    for when in _WHEN:
        own, other = getattr(judged, when), getattr(reference, when)
        differing += sum(_bits(own[key], other[key]) if key in own else other[key].numel() for key in other)
    return differing


def _hashes(judged: Trace, reference: Trace) -> dict[str, Any]:
    """How many full-state hashes were compared, how many differ, and after how many tokens the first one does."""
    own, other = judged.state_hashes, reference.state_hashes
    lengths = sorted({*own, *other})
    wrong = [length for length in lengths if own.get(length) != other.get(length)]
    return {"hashes": len(lengths), "hashes_differing": len(wrong), "hash_differs_at": wrong[0] if wrong else None}


def _bits(a: Tensor, b: Tensor) -> int:
    if a.shape != b.shape:
        return max(a.numel(), b.numel())
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def _caches(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative RMS difference of each kind of cache over all layers; infinity where a cache is missing."""
    differences = {}
    for kind in STATE_KINDS:
        names = [name for name in reference if name.endswith(f".{kind}")]
        whole = all(name in other and other[name].shape == reference[name].shape for name in names)
        if names:
            pairs = [(reference[name], other[name]) for name in names] if whole else []
            differences[kind] = relative_rms(pairs) if whole else math.inf
    return differences


def noise(arms: Arms, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The baseline against itself with another number of ranks: logits of every token, caches of every sequence."""
    sequences = [list(text[: FLOOR_PROMPT + FLOOR_TOKENS]) for text in texts[:FLOOR_SEQUENCES]]
    steps: dict[str, list[Tensor]] = {}
    caches: dict[str, list[dict[str, Tensor]]] = {}
    for name, arm in (("baseline", arms.baseline), ("floor", arms.floor)):
        steps[name], caches[name] = _decoded(arm, sequences)
    pairs = zip(steps["baseline"], steps["floor"], strict=True)
    differences = [_caches(a, b) for a, b in zip(caches["baseline"], caches["floor"], strict=True)]
    return {
        "logit_rms": [value for a, b in pairs for value in centred_logit_rms(a, b).tolist()],
        "caches": {kind: [d[kind] for d in differences] for kind in differences[0]},
    }


def _decoded(arm: Arm, sequences: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    decode = arm.forced_decode(sequences, FLOOR_PROMPT)
    try:
        return [step.logits for step in decode], [decode.state(i) for i in range(len(sequences))]
    finally:
        decode.close()
