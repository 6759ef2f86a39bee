"""A/A calibration: how often a decision would call equal arms unequal, on the noise that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evals.statistics.noninferiority import Outcome, evidence, lower_bound, upper_bound


def aa_rates(
    differences: Sequence[Sequence[float]], margin: float, alpha: float, seed: int, runs: int = 2_000
) -> Mapping[Outcome, float]:
    """Shares of the outcomes over `runs` A/A runs made from paired differences, item by item.

    Each run exchanges the arms of every pair with probability 1/2, which makes them equal and keeps all else: items,
    repeats, and how much pairs differ.

    Raises:
        ValueError: no item, or an item without a pair.
    """
    if not differences or not all(differences):
        raise ValueError("every item needs at least one paired difference")
    flat = np.concatenate([np.asarray(d, dtype=np.float64) for d in differences])
    sizes = np.array([len(d) for d in differences])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(runs, flat.size))
    seen = evidence(np.add.reduceat(signs * flat, starts, axis=1) / sizes, flat.size)
    go = upper_bound(seen, alpha) <= margin
    no_go = ~go & (lower_bound(seen, alpha) > margin)
    rates = {Outcome.GO: float(np.mean(go)), Outcome.NO_GO: float(np.mean(no_go))}
    return {**rates, Outcome.UNDECIDED: 1 - rates[Outcome.GO] - rates[Outcome.NO_GO]}
