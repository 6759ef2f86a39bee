"""What the stability gate shows: outcomes, acceptance by context, entropy and KL along the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evals.statistics import Interval
from validation.gates.base import Plot, Table
from validation.gates.parity.judge import TYPICAL_MULTIPLE
from validation.gates.stability.judge import TaskJudgement
from validation.gates.stability.measure import ARMS, BUCKET, QUARTERS

Results = Mapping[str, Mapping[str, Any]]

_QUARTERS = [f"quarter {i + 1}" for i in range(QUARTERS)]


def outcome_table(results: Results, judged: Mapping[str, TaskJudgement]) -> Table:
    """Bad outcomes by task and kind, in all three decodes, with the paired test."""
    rows = [
        [unit, results[unit]["prompts"], name, *rate[:5], f"{rate[5]:.2g}"]
        for unit, task in judged.items()
        for name, rate in task.rates.items()
    ]
    header = ["task", "prompts", "outcome", "baseline", "candidate", "floor", "lost", "gained", "p"]
    caption = (
        "Answers with a bad outcome; the floor is the baseline with other roundings. Lost: good in the baseline, bad "
        "in the candidate. p: exact, one-sided, paired."
    )
    return Table("Outcomes of long answers", header, rows, caption)


def text_table(results: Results) -> Table:
    """Length, repetition, compression and token-0 counts by task and arm."""
    rows: list[list[str | int | float]] = []
    for unit, result in results.items():
        for arm in ARMS:
            figures = result[arm]
            n = len(figures)
            rows.append(
                [
                    unit,
                    arm,
                    sum(f["tokens"] for f in figures),
                    f"{sum(f['finish'] == 'stop' for f in figures) / n:.0%}",
                    f"{sum(f['repeated_share'] for f in figures) / n:.3f}",
                    f"{sum(f['compression'] for f in figures) / n:.2f}",
                    sum(f["zero_tokens"] for f in figures),
                    " / ".join(_entropies(figures)),
                ]
            )
    header = [
        "task",
        "arm",
        "tokens",
        "ended by itself",
        "repeated 8-grams",
        "size / zlib",
        "tokens 0",
        "entropy by quarter",
    ]
    return Table("The texts", header, rows, "Means over prompts; entropy in nats a token at temperature 1.")


def _entropies(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = zip(*(f["entropy"] for f in figures), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return [f"{sum(column) / len(column):.2g}" if column else "-" for column in known]


def acceptance_plots(judged: Mapping[str, TaskJudgement]) -> list[Plot]:
    """Drafts accepted a step, by context, for every task that speculates."""
    plots = []
    for unit, task in judged.items():
        if not task.acceptance:
            continue
        columns = list(task.acceptance.values())
        series: dict[str, list[float | None]] = {arm: [getattr(column, arm) for column in columns] for arm in ARMS}
        labels = [f"{place}-{int(place) + BUCKET - 1}" for place in task.acceptance]
        n = max(column.difference.n for column in columns)
        title = f"Accepted drafts by context, {unit}"
        plots.append(
            Plot(title, "line", labels, series, "place of the step", "drafts accepted a step", f"n = {n} prompts")
        )
    return plots


def drift_plot(quarters: Sequence[Interval], sequences: int) -> Plot:
    """Typical KL in floors along a long text."""
    series: dict[str, list[float | None]] = {
        "typical KL": [math.exp(q.mean) for q in quarters],
        "upper bound": [math.exp(q.upper) if math.isfinite(q.upper) else None for q in quarters],
    }
    caption = f"Teacher-forced; n = {sequences} texts. Floor: the baseline with other roundings."
    return Plot(
        "Typical KL along a long text",
        "line",
        _QUARTERS,
        series,
        "part of the text",
        "floors",
        caption,
        limit=TYPICAL_MULTIPLE,
    )
