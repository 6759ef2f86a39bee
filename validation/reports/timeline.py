"""A timeline: rows down, time across, a mark for every event, a line from where it began to where it took effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from validation.records.record import PlotDoc

BEGAN = "issued behind"
"""The series that says behind which event each event began, where it began earlier than it took effect."""


def draw_timeline(axes: Axes, plot: PlotDoc, palette: Sequence[str], markers: str, ink: str) -> None:
    """Draw the marks and lines of a plot of kind `timeline`; series values are whole-numbered rows."""
    marks = {name: values for name, values in plot.series.items() if name != BEGAN}
    rows = [_first(marks, place) for place in range(len(plot.x))]
    for place, since in enumerate(plot.series.get(BEGAN, [])):
        row = rows[place]
        if isinstance(since, int | float) and row is not None:
            axes.plot([since + 0.5, place + 1], [row, row], color=ink, linewidth=3, alpha=0.3, solid_capstyle="butt")
    for index, (name, values) in enumerate(marks.items()):
        shown = [(place + 1, value) for place, value in enumerate(values) if isinstance(value, int | float)]
        axes.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            label=name,
            color=palette[index % len(palette)],
            marker=markers[index % len(markers)],
            linestyle="none",
            markersize=7,
        )
    known = [row for row in rows if row is not None]
    most = int(max(known, default=0))
    axes.set_yticks(range(most + 1))
    axes.set_ylim(most + 0.5, -0.5)
    axes.set_xlim(0, len(plot.x) + 1)
    axes.set_xticks(range(1, len(plot.x) + 1, 1 + len(plot.x) // 30))


def _first(marks: Mapping[str, Sequence[object]], place: int) -> float | None:
    found = (values[place] for values in marks.values())
    return next((float(row) for row in found if isinstance(row, int | float)), None)
