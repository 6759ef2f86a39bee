"""Where a damage sits: tables of scores by output length and by group, and the answers that changed sides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evals.breakdown import Row, by_group, by_length
from evals.judge import Judgement, TaskJudgement
from evals.samples import ARMS
from evals.tasks.kinds import area
from validation.gates.base import Table

MOST_FLIPS = 12
"""Flips shown per eval; all of them are in `samples/`."""

_HEAD, _TAIL = 150, 350
"""Characters of a transcript that are shown: how it begins, and the end, where the answer is."""


def points(value: float) -> str:
    """A difference of scores in points of a hundred."""
    return f"{100 * value:+.1f}" if math.isfinite(value) else "unbounded"


def breakdowns(task: TaskJudgement, judged: Judgement) -> Iterator[Table]:
    """Scores by output length, and by group where there are groups."""
    alpha, seed, name = judged.settings.alpha, judged.settings.seed, task.task.name
    rows = by_length(task.scored, alpha, seed)
    yield _rows_table(
        f"Score by output length, {name}", "tokens", rows, "Quarters of the baseline's answers by length."
    )
    groups = by_group(task.task, task.scored, alpha, seed)
    if groups:
        caption = ""
        if task.task.kind.ordered:
            areas = [area([row.score[arm] for row in groups]) for arm in ARMS]
            caption = f"Area under the scores by bin: baseline {areas[0]:.3f}, candidate {areas[1]:.3f}."
        yield _rows_table(f"Score by {task.task.kind.group_title}, {name}", task.task.kind.group_title, groups, caption)


def _rows_table(title: str, label: str, rows: Sequence[Row], caption: str) -> Table:
    missed = any(sum(row.missed.values()) for row in rows)
    header = [label, "pairs", *ARMS, "damage", "at least", "at most", *(f"length, {arm}" for arm in ARMS)]
    cells: list[list[str | int | float]] = []
    for row in rows:
        bounds = [points(value) for value in (row.damage.mean, row.damage.lower, row.damage.upper)]
        lengths = [f"{row.length[arm]:.0f}" for arm in ARMS]
        counts: list[str | int | float] = [row.missed[arm] for arm in ARMS] if missed else []
        cells.append([row.label, row.pairs, *(f"{row.score[arm]:.1%}" for arm in ARMS), *bounds, *lengths, *counts])
    if missed:
        header += [f"prefix missing, {arm}" for arm in ARMS]
    return Table(title, header, cells, f"{caption} Bounds: cluster bootstrap over items.".strip())


def flips(task: TaskJudgement) -> Table:
    """Answers that changed sides, both side by side, lost ones first."""
    rows: list[list[str | int | float]] = [
        [
            pair.request.key,
            "lost" if pair.damage > 0 else "gained",
            _shown(task.task.expected(pair.request.item, pair.request.repeat)),
            _shown(pair.baseline.response.text),
            _shown(pair.candidate.response.text),
        ]
        for pair in task.flips[:MOST_FLIPS]
    ]
    caption = f"{len(rows)} of {len(task.flips)}; long texts are cut in the middle. All are in samples/."
    return Table(f"Flips, {task.task.name}", ["answer", "change", "right", *ARMS], rows, caption)


def _shown(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} [...] {text[-_TAIL:]}"
