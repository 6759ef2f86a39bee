"""Drafts drawn and verified on the engine itself: the second token of many answers against its exact distribution.

The enumeration of `parity_rejection` knows the rule alone; here drafter, speculator and sampler work together. One
prompt is answered with many seeds. Given the first token, the second one, which a verify step chose, must have the
distribution that the target's logits give: a chi-square test over the commonest tokens, the rest together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from scipy.stats import chi2

from validation.gates.base import Context, Finding
from validation.gates.parity_measure import windows
from validation.targets.base import Arm, ArmConfig
from validation.targets.text import Ask

UNIT = "sampled-drafts"
"""The unit's id."""

ALPHA = 1e-6
"""Chance that a healthy engine fails: it is asked for every night, and no night of a century should be lost to it."""

LEAST_EXPECTED = 5.0
"""Expected count of a cell (Cochran, 1954); rarer tokens are counted together."""

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
        "statistic": statistic,
        "freedom": freedom,
        "p": float(chi2.sf(statistic, freedom)) if freedom else 1.0,
        "accepted": sum(step.accepted > 0 for step in first_steps) / max(1, len(first_steps)),
    }


def _statistic(context: Context, prompt: Sequence[int], pairs: Mapping[tuple[int, int], int]) -> tuple[float, int]:
    """Chi-square over (first, second) tokens, given the first ones; the target's logits come without drafts."""
    firsts = Counter({first: sum(n for (a, _), n in pairs.items() if a == first) for first, _ in pairs})
    arm = context.target.open(replace(sampled_config(context.candidate), drafts=0, draft_sampling="greedy"))
    statistic, freedom = 0.0, 0
    for first, count in firsts.items():
        exact = _next(arm, [*prompt, first])
        common = [token for token, p in enumerate(exact) if p * count >= LEAST_EXPECTED]
        rest = count - sum(pairs.get((first, token), 0) for token in common)
        cells = [(pairs.get((first, token), 0), exact[token] * count) for token in common]
        cells.append((rest, count - sum(expected for _, expected in cells)))
        kept = [(seen, expected) for seen, expected in cells if expected >= LEAST_EXPECTED]
        if len(kept) < 2:
            continue
        # A rest too rare to count leaves the others' sum free, which only makes the test more cautious.
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in kept)
        freedom += len(kept) - (len(kept) == len(cells))
    return statistic, freedom


def _next(arm: Arm, tokens: Sequence[int]) -> list[float]:
    """The distribution of the token that follows."""
    decode = arm.forced_decode([list(tokens)], len(tokens) - 1)
    try:
        [step] = list(decode)
    finally:
        decode.close()
    probabilities: list[float] = torch.softmax(step.logits[0].double() / TEMPERATURE, -1).tolist()
    return probabilities


def sampled_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """Answers that ended in an error, or second tokens of another distribution."""
    if result["errors"]:
        yield Finding("engine", f"{result['errors']} of {result['sampled']} sampled answers ended in an error", unit)
    if result["p"] < ALPHA:
        message = (
            f"second tokens of {result['sampled']} answers with drawn drafts do not follow the target's distribution: "
            f"chi-square {result['statistic']:.4g} at {result['freedom']} degrees of freedom, p = {result['p']:.2g}, "
            f"allowed from {ALPHA:.0e}; {result['accepted']:.1%} of first drafts were accepted"
        )
        yield Finding("accept", message, unit)
