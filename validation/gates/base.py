"""The gate protocol: a gate plans units, measures each one, and judges the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from validation.targets.base import ArmConfig, Capability, Target
from validation.verdict import Verdict

Json = Any
"""A value that `json.dumps` takes with `allow_nan=False`."""


@dataclass(frozen=True)
class Unit:
    """The smallest resumable piece of a gate. `id` is unique in its gate and safe as a file name."""

    id: str
    params: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What a gate works with: one target, two arms, the run's seed and the gate's settings from the profile."""

    target: Target
    baseline: ArmConfig
    candidate: ArmConfig
    seed: int
    settings: Mapping[str, Json]


@dataclass(frozen=True)
class Finding:
    """One reason for a verdict, as a sentence with numbers: what was seen, what is allowed, where.

    `component` names what to look at: an op of docs/ops.md, a layer, a batch bin.
    """

    component: str
    message: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the report: header, rows of cells, and a caption that names units and n.

    A `brief` one is in the Markdown summary too, so it is small and carries the decision.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]
    caption: str = ""
    brief: bool = False


@dataclass(frozen=True)
class Plot:
    """A chart of the report, as data. `kind`: `line`, `bar`, `histogram` (bar over bin edges) or `timeline` (marks at
    whole-numbered rows over time; the series `issued behind` gives the place at which an event began).

    `series` maps a label to its y values over the shared `x`; `x` may hold numbers or labels. `limit` is the value that
    must not be exceeded, drawn across the chart.
    """

    title: str
    kind: str
    x: Sequence[str | int | float]
    series: Mapping[str, Sequence[float | None]]
    x_label: str
    y_label: str
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class GateResult:
    """A gate's verdict with its evidence."""

    gate: str
    verdict: Verdict
    summary: str
    findings: Sequence[Finding] = ()
    metrics: Mapping[str, Json] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()


class Gate(Protocol):
    """One question about the candidate. Stateless: all it knows comes from the context and the units' results."""

    name: str
    layer: int
    question: str
    needs: frozenset[Capability]
    cost: str

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Why these settings (a profile's `[gates.NAME]` table) are not valid, or None."""
        ...

    def arms(self, context: Context) -> Sequence[ArmConfig]:
        """Every arm that the units will open, so that one that cannot be opened is refused before anything is measured.

        Raises:
            ValueError: the settings cannot be measured on this target at all.
        """
        ...

    def plan(self, context: Context) -> Sequence[Unit]:
        """The units to measure, in order; the same for the same context."""
        ...

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Measure one unit; the result is plain JSON and depends on unit and context only."""
        ...

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """The verdict from the results of all units, by unit id."""
        ...
