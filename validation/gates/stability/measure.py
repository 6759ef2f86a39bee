"""Measuring stability: the same prompts answered at length by baseline, candidate and the baseline's other rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evals.degeneration import compression_ratio, loop_onset, repeated_share
from evals.items import chain
from numerics.logits import LogitStats
from validation.gates.parity.measure import KL_RESOLUTION, Arms, own_path_asked, windows
from validation.targets.base import Arm, Target
from validation.targets.optional import expect
from validation.targets.text import Answer, Ask

ARMS = ("baseline", "candidate", "floor")

BUCKET = 128
"""Places of one context bucket, by which acceptance is compared."""

QUARTERS = 4
"""Parts of a text that entropy and KL are averaged over, to show drift."""

_ROOM = 16
"""Tokens beyond the right answer before an answer counts as cut off."""

_TEXT_PROMPT = 48


@dataclass(frozen=True)
class Task:
    """Prompts of one kind, and for each the right answer's text where there is one."""

    asks: list[Ask]
    right: list[str]


def chains(target: Target, count: int, tokens: int, seed: int) -> Task:
    """Greedy chains of about `tokens` tokens: one known right token at every place."""
    rng = np.random.default_rng(seed)
    items = [
        chain.item("eval", int(rng.integers(2**31)), max(2, tokens // chain.TOKENS_PER_STEP)) for _ in range(count)
    ]
    stop = tuple(target.stop_tokens())
    asks = [
        Ask(tuple(target.chat(chain.messages(item.row))), len(target.tokens(item.target)) + _ROOM, i, stop_tokens=stop)
        for i, item in enumerate(items)
    ]
    return Task(asks, [item.target for item in items])


def free_text(target: Target, count: int, tokens: int, seed: int) -> Task:
    """Held-out text to go on from, sampled at temperature 1: nothing is right or wrong, much can degenerate."""
    prompts = windows(target, count, _TEXT_PROMPT, seed)
    stop = tuple(target.stop_tokens())
    return Task([Ask(tuple(p), tokens, seed + i, 1.0, stop_tokens=stop) for i, p in enumerate(prompts)], [])


def measure_answers(target: Target, arms: Arms, task: Task, batch: int) -> dict[str, Any]:
    """Every arm's answers as figures per prompt; plain JSON."""
    before = arms.candidate.counters()
    own_path = own_path_asked(target, arms.baseline.config, arms.candidate.config)
    result: dict[str, Any] = {"prompts": len(task.asks), "own_path": own_path}
    for name in ARMS:
        arm: Arm = getattr(arms, name)
        answers = [a for i in range(0, len(task.asks), batch) for a in arm.answer(task.asks[i : i + batch])]
        right: Sequence[str | None] = task.right or [None] * len(answers)
        result[name] = [_figures(target, answer, text) for answer, text in zip(answers, right, strict=True)]
    after = arms.candidate.counters()
    result["paths"] = {path: n - before.steps.get(path, 0) for path, n in after.steps.items()}
    result["fallbacks"] = {why: n - before.fallbacks.get(why, 0) for why, n in after.fallbacks.items()}
    return result


def _figures(target: Target, answer: Answer, right: str | None) -> dict[str, Any]:
    """One answer's figures. Nothing of its text is kept but what is counted."""
    text = target.text(answer.tokens)
    onset = loop_onset(answer.tokens)
    figures: dict[str, Any] = {
        "tokens": len(answer.tokens),
        "finish": answer.finish,
        "error": answer.error,
        "loop_onset": onset,
        "zero_tokens": sum(token == 0 for token in answer.tokens),
        "repeated_share": repeated_share(answer.tokens),
        "compression": compression_ratio(text.encode()),
        "entropy": _by_quarter(answer.entropies),
        "acceptance": _acceptance(answer),
        "norms": sorted(answer.state_norms.items()),
    }
    if right is not None:
        figures["right"] = _right_share(text, right)
    return figures


def _right_share(text: str, right: str) -> float:
    """Share of the right answer that the text gives before its first wrong character; 1 only for the whole of it."""
    same = next((i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
    return 1.0 if text == right else min(same, len(right) - 1) / len(right)


def _by_quarter(values: Sequence[float]) -> list[float | None]:
    finite = np.asarray(values, dtype=np.float64)
    parts = [part[np.isfinite(part)] for part in np.array_split(finite, QUARTERS)]
    return [float(part.mean()) if len(part) else None for part in parts]


def _acceptance(answer: Answer) -> dict[str, list[int]]:
    """By context bucket: verify steps, and drafts accepted in them."""
    counted: dict[str, list[int]] = {}
    for step in answer.verify_steps:
        steps, accepted = counted.get(str(step.place // BUCKET), [0, 0])
        counted[str(step.place // BUCKET)] = [steps + 1, accepted + step.accepted]
    return counted


def measure_drift(arms: Arms, sequences: Sequence[Sequence[int]], prompt: int) -> dict[str, Any]:
    """Teacher-forced decode of long texts: log KL by quarter of the text, per sequence, candidate and floor."""
    seen = {"candidate": LogitStats(), "floor": LogitStats()}
    for arm in (arms.baseline, arms.floor, arms.candidate):
        expect(arm, [(sequences, prompt)])
    decodes = [arm.forced_decode(sequences, prompt) for arm in (arms.baseline, arms.candidate, arms.floor)]
    try:
        for reference, judged, other in zip(*decodes, strict=True):
            seen["candidate"].add(reference.logits, judged.logits)
            seen["floor"].add(reference.logits, other.logits)
    finally:
        for decode in decodes:
            decode.close()
    steps, batch = len(sequences[0]) - prompt, len(sequences)
    return {"tokens": steps * batch, **{arm: _log_quarters(stats, steps, batch) for arm, stats in seen.items()}}


def _log_quarters(stats: LogitStats, steps: int, batch: int) -> dict[str, Any]:
    kl = stats.per_token()["kl"].view(steps, batch)
    logs = (kl + KL_RESOLUTION).log()
    parts = [part.mean(0).tolist() for part in torch.tensor_split(logs, QUARTERS)]
    summary = stats.summary()
    return {"log_kl": parts, "nonfinite": summary.candidate_nonfinite + summary.reference_nonfinite}
