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
from validation.targets.base import OWN_PATH, Arm, Target
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
        result[name] = [
            _figures(target, *one, drafts=arm.config.drafts) for one in zip(task.asks, answers, right, strict=True)
        ]
    after = arms.candidate.counters()
    result["paths"] = {path: n - before.steps.get(path, 0) for path, n in after.steps.items()}
    result["fallbacks"] = {why: n - before.fallbacks.get(why, 0) for why, n in after.fallbacks.items()}
    return result


def second_half(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of the answers that were asked again."""
    asked = result["prompts"] // 2
    return {**result, "prompts": asked, **{arm: result[arm][asked:] for arm in ARMS}}


def _figures(target: Target, ask: Ask, answer: Answer, right: str | None, drafts: int) -> dict[str, Any]:
    """One answer's figures. Nothing of its text is kept but what is counted."""
    text = target.text(answer.tokens)
    onset = loop_onset(answer.tokens)
    figures: dict[str, Any] = {
        "tokens": len(answer.tokens),
        "finish": answer.finish,
        "error": answer.error,
        "misended": _misended(ask, answer),
        "loop_onset": onset,
        "zero_tokens": sum(token == 0 for token in answer.tokens),
        "repeated_share": repeated_share(answer.tokens),
        "compression": compression_ratio(text.encode()),
        "entropy": _by_quarter(answer.entropies),
        "acceptance": _acceptance(ask, answer) if drafts else {},
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


def _misended(ask: Ask, answer: Answer) -> str:
    """How an answer's end contradicts itself or what was asked, or nothing: no comparison is needed to say so."""
    tokens, stops = answer.tokens, frozenset(ask.stop_tokens)
    passed = next((i for i, token in enumerate(tokens[:-1]) if token in stops), None)
    if answer.finish == "error":
        return ""
    if passed is not None:
        return f"goes on behind its stop token, by {len(tokens) - 1 - passed} tokens"
    if answer.finish == "length" and len(tokens) != ask.max_tokens:
        return f"ended by its length with {len(tokens)} tokens of {ask.max_tokens}"
    if answer.finish == "stop" and not stops.intersection(tokens[-1:]):
        return "ended by a stop token that it does not have"
    return ""


def _acceptance(ask: Ask, answer: Answer) -> dict[str, list[int]]:
    """By context bucket: decode steps, and drafts accepted in them. A step that had no drafts accepts none, or a
    drafter that falls silent would leave nothing to compare."""
    verified = {step.place: step.accepted for step in answer.verify_steps}
    counted: dict[str, list[int]] = {}
    place, end = len(ask.prompt), len(ask.prompt) + len(answer.tokens) - 1
    while place < end:
        steps, accepted = counted.get(str(place // BUCKET), [0, 0])
        counted[str(place // BUCKET)] = [steps + 1, accepted + verified.get(place, 0)]
        place += 1 + verified.get(place, 0)
    return counted


def measure_drift(target: Target, arms: Arms, sequences: Sequence[Sequence[int]], prompt: int) -> dict[str, Any]:
    """Teacher-forced decode of long texts: log KL by quarter of the text, per sequence, candidate and floor."""
    seen = {"candidate": LogitStats(), "floor": LogitStats()}
    for arm in (arms.baseline, arms.floor, arms.candidate):
        expect(arm, [(sequences, prompt)])
    decodes = [arm.forced_decode(sequences, prompt) for arm in (arms.baseline, arms.candidate, arms.floor)]
    elsewhere = 0
    try:
        for reference, judged, other in zip(*decodes, strict=True):
            elsewhere += len(judged.logits) * (judged.path != OWN_PATH)
            seen["candidate"].add(reference.logits, judged.logits)
            seen["floor"].add(reference.logits, other.logits)
    finally:
        for decode in decodes:
            decode.close()
    steps, batch = len(sequences[0]) - prompt, len(sequences)
    own_path = own_path_asked(target, arms.baseline.config, arms.candidate.config)
    judged_elsewhere = elsewhere if own_path else 0
    return {
        "tokens": steps * batch,
        "elsewhere": judged_elsewhere,
        **{arm: _log_quarters(stats, steps, batch) for arm, stats in seen.items()},
    }


def _log_quarters(stats: LogitStats, steps: int, batch: int) -> dict[str, Any]:
    kl = stats.per_token()["kl"].view(steps, batch)
    logs = (kl + KL_RESOLUTION).log()
    parts = [part.mean(0).tolist() for part in torch.tensor_split(logs, QUARTERS)]
    summary = stats.summary()
    return {"log_kl": parts, "nonfinite": summary.candidate_nonfinite + summary.reference_nonfinite}
