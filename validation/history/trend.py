"""The course of every figure over the runs of a series, and which of the steps among many figures are believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from scipy.stats import false_discovery_control

from validation.history.entry import Entry
from validation.history.steps import Step, steps

FALSE_SHARE = 0.05
"""Of the figures that are said to have a step, the share expected to have none (Benjamini and Hochberg, 1995)."""


@dataclass(frozen=True)
class Course:
    """One figure over the runs that have it, oldest first; `baseline` is its value in the baseline run."""

    gate: str
    name: str
    runs: tuple[str, ...]
    values: tuple[float, ...]
    steps: tuple[Step, ...]
    baseline: float | None

    @property
    def change(self) -> float | None:
        """The last value relative to the baseline's; None where that is absent or zero."""
        return None if not self.baseline else self.values[-1] / self.baseline - 1


def by_series(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Runs by series in their order. Runs with faults put in on purpose say nothing about the candidate."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.faults:
            found.setdefault(entry.series, []).append(entry)
    return found


def courses(runs: Sequence[Entry], baseline: Entry | None, gate: str | None, metric: str | None) -> list[Course]:
    """Every chosen figure of a series; steps are kept where they are believed among all of the chosen figures.

    Runs of the same code and seed repeat a value; they are all counted, as they are.
    """
    names = dict.fromkeys(name for run in runs for name in run.figures)
    chosen = [n for n in names if gate in (None, n[0]) and (metric is None or fnmatchcase(n[1], metric))]
    found: dict[tuple[str, str], tuple[list[tuple[str, float]], list[Step]]] = {}
    for name in chosen:
        points = [(run.id, run.figures[name]) for run in runs if math.isfinite(run.figures.get(name, math.nan))]
        if points:
            found[name] = points, steps([value for _, value in points])
    believed = _believed({name: max(s.p for s in own) for name, (_, own) in found.items() if own}, len(found))
    return [
        Course(
            gate=name[0],
            name=name[1],
            runs=tuple(run for run, _ in points),
            values=tuple(value for _, value in points),
            steps=tuple(own) if name in believed else (),
            baseline=baseline.figures.get(name) if baseline else None,
        )
        for name, (points, own) in found.items()
    ]


def _believed(p: Mapping[tuple[str, str], float], figures: int) -> set[tuple[str, str]]:
    """Figures whose steps survive; those without a step count as tests that found nothing."""
    if not p:
        return set()
    padded = [*p.values(), *([1.0] * (figures - len(p)))]
    adjusted = false_discovery_control(padded, method="bh")
    return {name for name, value in zip(p, adjusted, strict=False) if value <= FALSE_SHARE}


def since(course: Course, run: str | None) -> list[Step]:
    """Steps after a run: those whose first value is of a later run. Without a run, all."""
    if run is None or run not in course.runs:
        return list(course.steps)
    return [step for step in course.steps if step.index > course.runs.index(run)]
