"""Drafts drawn and verified on the engine itself: the second token of many answers against its exact distribution.

The enumeration of `rejection.py` knows the rule alone; here drafter, speculator and sampler work together. One
prompt is answered with many seeds. Given the first token, the second one, which a verify step chose, must have the
distribution that the target's logits give: a chi-square test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from validation.gates.base import Context, Finding
from validation.gates.parity.measure import windows
from validation.targets.base import Arm, ArmConfig
from validation.targets.text import Ask

UNIT = "sampled-drafts"
"""The unit's id."""

ALPHA = 1e-6
"""Chance that a healthy engine fails: it is asked for every night, and no night of a century should be lost to it."""

LEAST_EXPECTED = 5.0
"""Expected count of a group that is judged (Cochran, 1954)."""

GROUPS = 8
"""Groups of tokens that are told apart."""

TEMPERATURE = 3.0
"""A small model is sure of most tokens; hot sampling spreads the counts over cells."""

PROMPT, DRAFTS, TOKENS = 65, 3, 5
"""The prompt fills a prefix block and one token more, so that it is run once; two drafts at least follow token one."""


def sampled_config(config: ArmConfig) -> ArmConfig:
    """The candidate with drawn drafts."""
    return replace(
        config,
        kv_cache_dtype="fp8",
        tensor_parallel=1,
        context_parallel=1,
        max_batch=32,
        max_context=PROMPT + TOKENS + 1,
        drafts=DRAFTS,
        draft_sampling="sampled",
    )


def measure_sampled(context: Context, answers: int) -> dict[str, Any]:
    """Plain JSON: the statistic, its degrees of freedom and its p-value, with what was accepted."""
    [prompt] = windows(context.target, 1, PROMPT, context.seed)
    asks = [Ask(tuple(prompt), TOKENS, context.seed * 100_003 + i, TEMPERATURE) for i in range(answers)]
    given = context.target.open(sampled_config(context.candidate)).answer(asks)
    pairs = Counter((one.tokens[0], one.tokens[1]) for one in given if len(one.tokens) > 1)
    first_steps = [one.verify_steps[0] for one in given if one.verify_steps]
    statistic, freedom = _statistic(context, prompt, pairs)
    return {
        "sampled": answers,
        "errors": sum(one.finish == "error" for one in given),
        "verified": len(first_steps),
        "statistic": statistic,
        "freedom": freedom,
        "p": float(chi2.sf(statistic, freedom)) if freedom else 1.0,
        "accepted": sum(step.accepted > 0 for step in first_steps) / max(1, len(first_steps)),
    }


def _statistic(context: Context, prompt: Sequence[int], pairs: Mapping[tuple[int, int], int]) -> tuple[float, int]:
    """Chi-square over GROUPS groups of second tokens, given the first ones.

    A group holds about an equal part of the target's distribution behind its first token, the likeliest tokens first;
    so every answer counts, however many different tokens there are. The target's logits come without drafts.
    """
    firsts = sorted({first for first, _ in pairs})
    arm = context.target.open(replace(sampled_config(context.candidate), drafts=0, draft_sampling="greedy"))
    exact = dict(zip(firsts, _next(arm, [[*prompt, first] for first in firsts]), strict=True))
    seen, expected = np.zeros(GROUPS), np.zeros(GROUPS)
    for (first, second), count in pairs.items():
        order = np.argsort(-exact[first], kind="stable")
        # A token belongs where the middle of its own share of the distribution lies.
        middle = np.cumsum(exact[first][order]) - exact[first][order] / 2
        group = np.empty(len(order), dtype=int)
        group[order] = np.minimum((middle * GROUPS).astype(int), GROUPS - 1)
        seen[group[second]] += count
        expected += count * np.bincount(group, exact[first], GROUPS)
    kept = expected >= LEAST_EXPECTED
    statistic = float((((seen - expected) ** 2)[kept] / expected[kept]).sum())
    return statistic, max(0, int(kept.sum()) - 1)


def _next(arm: Arm, sequences: Sequence[Sequence[int]]) -> Iterator[NDArray[np.float64]]:
    """The distribution of the token that follows each of the sequences."""
    most = arm.config.max_batch
    for first in range(0, len(sequences), most):
        batch = [list(sequence) for sequence in sequences[first : first + most]]
        decode = arm.forced_decode(batch, len(batch[0]) - 1)
        try:
            [step] = list(decode)
        finally:
            decode.close()
        yield from torch.softmax(step.logits.double() / TEMPERATURE, -1).numpy()


def sampled_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """Answers that ended in an error, or second tokens of another distribution."""
    if result["errors"]:
        yield Finding("engine", f"{result['errors']} of {result['sampled']} sampled answers ended in an error", unit)
    if not result["verified"] or not result["freedom"]:
        yield Finding(
            "engine",
            f"{result['verified']} of {result['sampled']} sampled answers verified drafts, at {result['freedom']} "
            "degrees of freedom: nothing was judged",
            unit,
        )
    if result["p"] < ALPHA:
        message = (
            f"second tokens of {result['sampled']} answers with drawn drafts do not follow the target's distribution: "
            f"chi-square {result['statistic']:.4g} at {result['freedom']} degrees of freedom, p = {result['p']:.2g}, "
            f"allowed from {ALPHA:.0e}; {result['accepted']:.1%} of first drafts were accepted"
        )
        yield Finding("accept", message, unit)
