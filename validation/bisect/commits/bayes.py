"""Bayesian bisection: which commit changed how often a test fails. The inference is git-bayesect's `Bisector`.

Only that class is used: the library's commands check commits out in the user's own tree, keep their state in its `.git`
and know no commit that cannot be built. What is added here: commits that cannot be judged, and the question whether
anything changed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from git_bayesect import Bisector
from scipy.special import betaln, logsumexp

from validation.bisect.commits.state import Outcome, Trial
from validation.errors import UsageError

GUESSED_WRONG, _GUESS_WEIGHT, _STATED_WEIGHT = 0.25, 4.0, 40.0
"""Share of wrong verdicts where the user states none, and what a guess and a statement weigh, in verdicts."""


@dataclass(frozen=True)
class Standing:
    """What the verdicts so far say.

    `suspects`: the likeliest first bad commit, behind those just before it that cannot be judged, oldest first.
    `change`: probability that the failure rate changed at all, against one rate for all commits, even odds before.
    `before`, `after`: (failures, runs) on either side of it. `next_commit`: where a verdict tells most.
    """

    suspects: tuple[str, ...]
    posterior: float
    change: float
    before: tuple[int, int]
    after: tuple[int, int]
    next_commit: str


def standing(history: Sequence[str], trials: Sequence[Trial], posterior: float, wrong: float | None) -> Standing:
    """Judge the trials. `history` goes from the good commit to the bad one.

    Raises:
        UsageError: the bad end cannot be judged.
    """
    skipped = {trial.commit for trial in trials if trial.outcome is Outcome.SKIP}
    if history[-1] in skipped:
        raise UsageError(f"--bad {history[-1][:12]} cannot be judged; give the next commit that can")
    groups = _groups(history, skipped)
    newest_first = [group[-1] for group in reversed(groups)]
    weights = np.array([float(len([c for c in group if c != history[0]])) for group in reversed(groups)])
    share, weight = (GUESSED_WRONG, _GUESS_WEIGHT) if wrong is None else (wrong, _STATED_WEIGHT)
    # A verdict known to be never wrong would make one slip impossible instead of unlikely.
    rare, usual = max(share * weight, 0.5), (1 - share) * weight
    bisector = Bisector(weights, alpha_new=usual, beta_new=rare, alpha_old=rare, beta_old=usual)
    place = {commit: i for i, commit in enumerate(newest_first)}
    for trial in trials:
        if trial.commit in place:
            bisector.record(place[trial.commit], trial.outcome is Outcome.BAD)
    with np.errstate(divide="ignore", invalid="ignore"):
        chances = bisector.distribution
        best = int(np.argmax(chances))
        chosen = bisector.select()
    (failures, runs), (failures_before, runs_before) = bisector.empirical_counts
    after, before = (int(failures[best]), int(runs[best])), (int(failures_before[best]), int(runs_before[best]))
    if chances[best] >= posterior and best + 1 < len(newest_first):
        # Which commit is settled: ask the side that was asked less whether anything changed there.
        chosen = best if after[1] <= before[1] else best + 1
    group = groups[len(groups) - 1 - best]
    return Standing(
        suspects=tuple(commit for commit in group if commit != history[0]),
        posterior=float(chances[best]),
        change=_change(bisector, weights, (usual, rare)),
        before=before,
        after=after,
        next_commit=newest_first[chosen],
    )


def _groups(history: Sequence[str], skipped: set[str]) -> list[list[str]]:
    """The commits that can be judged, oldest first, each behind those before it that cannot."""
    groups: list[list[str]] = [[]]
    for commit in history:
        groups[-1].append(commit)
        if commit not in skipped:
            groups.append([])
    return groups[:-1]


def _change(bisector: Bisector, weights: np.ndarray, prior: tuple[float, float]) -> float:
    """Probability of a change at an unknown commit against none, with Jeffreys' prior for the one rate."""
    (yes_after, runs_after), (yes_before, runs_before) = bisector.empirical_counts
    usual, rare = prior
    likelihood = (
        betaln(usual + yes_after, rare + runs_after - yes_after)
        + betaln(rare + yes_before, usual + runs_before - yes_before)
        - 2 * betaln(usual, rare)
    )
    change = logsumexp(likelihood, b=weights / weights.sum())
    yes, runs = int(yes_after[-1]), int(runs_after[-1])
    none = betaln(0.5 + yes, 0.5 + runs - yes) - betaln(0.5, 0.5)
    return float(np.exp(change - np.logaddexp(change, none)))
