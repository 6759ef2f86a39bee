"""The sampler asked directly: tokens as often as their probabilities say, draws that know nothing of each other.

An engine's text shows a wrong sampler only by its statistics, and a model that is sure of its tokens hardly then. Here
the rows of logits are small and flat, so a few thousand draws judge temperature, top-p and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from validation.errors import describe
from validation.gates.base import Finding
from validation.targets.optional import Accepting

UNIT = "sampler"
"""The unit's id."""

ALPHA = 1e-6
"""Chance that a healthy sampler fails one of the unit's tests, shared by all of them."""

SETTINGS = ((0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.7))
"""Temperature, top-p."""

SEEDS, POSITIONS, VOCABULARY = 250, 8, 5
"""Draws of a row: every position of every seed."""

SPREAD = 0.75
"""Logits lie so far to either side of 0: at every temperature no token is rare."""

LEAST_EXPECTED = 5.0
"""Expected count of a cell that is judged (Cochran, 1954)."""


def measure_sampler(arm: Accepting, seed: int) -> list[dict[str, Any]]:
    """Plain JSON: for every setting and question a p-value; rows that must be refused or pointed at, as 0 or 1."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits = torch.linspace(-SPREAD, SPREAD, VOCABULARY)[order]
    asked = []
    for temperature, top_p in SETTINGS:
        draws = np.array(
            [
                [arm.sample(logits, temperature, top_p, seed * 1000 + one, place) for place in range(POSITIONS)]
                for one in range(SEEDS)
            ]
        )
        name = f"temperature {temperature:g}, top-p {top_p:g}"
        exact = _exact(logits.double().numpy(), temperature, top_p)
        asked += [
            {"of": f"{name}: how often each token is drawn", "p": _frequencies(draws, exact)},
            {"of": f"{name}: a position's token given the one before it", "p": _independence(_pairs(draws), exact)},
            {"of": f"{name}: a seed's token given the seed before it", "p": _independence(_pairs(draws.T), exact)},
        ]
    return [*asked, *_certain(arm)]


def _exact(logits: NDArray[np.float64], temperature: float, top_p: float) -> NDArray[np.float64]:
    """Softmax at a temperature, cut behind the token that crosses top-p: f64 [vocab]."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.concatenate(([True], p[order].cumsum()[:-1] < top_p))
    p[order[~kept]] = 0.0
    return np.asarray(p / p.sum())


def _frequencies(draws: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    return _p_value(np.bincount(draws.ravel(), minlength=len(exact)), exact * draws.size)


def _pairs(draws: NDArray[np.int64]) -> NDArray[np.int64]:
    """Neighbours along the last axis, each draw in one pair: [pairs, 2]."""
    even = draws[:, : draws.shape[1] // 2 * 2]
    return even.reshape(-1, 2)


def _independence(pairs: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    size = len(exact)
    seen = np.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size * size)
    return _p_value(seen, np.outer(exact, exact).ravel() * len(pairs))


def _p_value(seen: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Of a chi-square test over cells of LEAST_EXPECTED and more; what is rarer is judged with the rarest of those."""
    if seen[expected == 0].any():
        return 0.0
    order = np.argsort(-expected)
    kept = int((expected >= LEAST_EXPECTED).sum())
    if kept < 2:
        raise ValueError(f"{int(seen.sum())} draws are too few for a chi-square test over {len(seen)} cells")
    cells = [(seen[i], expected[i]) for i in order[: kept - 1]]
    cells.append((seen[order[kept - 1 :]].sum(), expected[order[kept - 1 :]].sum()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(chi2.sf(statistic, kept - 1))


def _certain(arm: Accepting) -> Iterator[dict[str, Any]]:
    """What chance has no part in: greedy takes the largest, the first of equals; rows with NaN are refused."""
    row = torch.tensor([0.0, 3.0, 3.0, -1.0, 1.0])
    yield {"of": "temperature 0: the lowest id of the largest logits", "p": float(arm.sample(row, 0.0, 1.0, 0, 0) == 1)}
    for broken in (float("nan"), float("inf")):
        for temperature in (0.0, 1.0):
            spoilt = torch.tensor([0.0, 1.0, broken, -1.0, 1.0])
            said = _refused(arm, spoilt, temperature)
            yield {"of": f"temperature {temperature:g}: a row with {broken} is refused", "p": float(bool(said))}


def _refused(arm: Accepting, row: torch.Tensor, temperature: float) -> str:
    try:
        arm.sample(row, temperature, 1.0, 0, 0)
    except ValueError as error:
        return describe(error)
    return ""


def sampler_findings(unit: str, asked: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Questions whose answer has less than its share of ALPHA."""
    allowed = ALPHA / max(1, len(asked))
    for one in asked:
        if one["p"] < allowed:
            yield Finding("sample", f"sampler, {one['of']}: p = {one['p']:.2g}, allowed from {allowed:.0e}", unit)
