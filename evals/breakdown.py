"""Scores by output length and by group: where along an answer, or in which items, a damage sits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evals.graded import Pair
from evals.samples import ARMS
from evals.scorers import needle
from evals.statistics import Interval, cluster_bootstrap
from evals.tasks import EvalTask

QUARTERS = 4


@dataclass(frozen=True)
class Row:
    """Pairs of one length or group: mean score and mean length by arm, and the damage with its interval.

    `missed` counts answers of each arm that lack the string they must start with (MRCR).
    """

    label: str
    pairs: int
    score: Mapping[str, float]
    length: Mapping[str, float]
    damage: Interval
    missed: Mapping[str, int]


def by_length(pairs: Sequence[Pair], alpha: float, seed: int) -> list[Row]:
    """Rows by quarters of the baseline's output length."""
    lengths = [pair.baseline.length for pair in pairs]
    edges = sorted({int(edge) for edge in np.quantile(lengths, np.linspace(0, 1, QUARTERS + 1), method="lower")})
    if len(edges) < 2:
        return [_row(f"{edges[0]}", pairs, alpha, seed)]
    rows = []
    for low, high in pairwise(edges):
        last = high == edges[-1]
        inside = [p for p in pairs if low <= p.baseline.length < high or (last and p.baseline.length == high)]
        rows.append(_row(f"{low}-{high if last else high - 1}", inside, alpha, seed))
    return rows


def by_group(task: EvalTask, pairs: Sequence[Pair], alpha: float, seed: int) -> list[Row]:
    """Rows by the task's groups, in the order of their first numbers where they are lengths; none without groups."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[task.group(pair.request.item)].append(pair)
    groups.pop("", None)
    order = sorted(groups, key=_first_number) if task.kind.ordered else sorted(groups)
    return [_row(label, groups[label], alpha, seed) for label in order]


def _first_number(label: str) -> int:
    digits = label.lstrip("> ").split("-")[0]
    return int(digits) + label.startswith(">")


def _row(label: str, pairs: Sequence[Pair], alpha: float, seed: int) -> Row:
    damage = cluster_bootstrap(
        [pair.damage for pair in pairs], [pair.request.item for pair in pairs], alpha, seed, resamples=2000
    )
    return Row(
        label=label,
        pairs=len(pairs),
        score={arm: float(np.mean([pair.arm(arm).grade.score for pair in pairs])) for arm in ARMS},
        length={arm: float(np.mean([pair.arm(arm).length for pair in pairs])) for arm in ARMS},
        damage=damage,
        missed={arm: sum(pair.arm(arm).grade.note == needle.PREFIX for pair in pairs) for arm in ARMS},
    )
