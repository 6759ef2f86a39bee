"""Plots of gates as SVG: the same bytes from run to run, no network, colours that colour-blind readers tell apart.

Text and axes take the colour of the page around them (`currentColor`), so one file serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from validation.records.record import PlotDoc
from validation.reports.text import shortened, visible_line
from validation.reports.timeline import draw_timeline

# Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is too light on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "osD^vP"
_FEW_DECADES = 15
_INK = "#123454"
"""Stands for the colour of the surrounding text until the SVG is written."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
}
_MOST_LABELS = 24
_MOST_TICKS = 10
_LONGEST_LABEL = 60


def svg(plot: PlotDoc, salt: str) -> str:
    """The plot as one `<svg>` element. `salt` sets its ids apart from those of other plots on the page."""
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": f"decodegate-{salt}"}
    with mpl.rc_context(style):
        height = 3.2 + 0.6 * (_crowded(plot) + (len(plot.series) > 1))
        figure = Figure(figsize=(6.4, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw(axes, plot)
        axes.set_xlabel(_label(plot.x_label))
        axes.set_ylabel(_label(plot.y_label))
        if len(plot.series) > 1 or plot.limit is not None:
            figure.legend(loc="outside upper left", fontsize=8, ncols=3)
        buffer = io.StringIO()
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    return _tidy(buffer.getvalue(), visible_line(plot.title))


def non_finite(plot: PlotDoc) -> int:
    """How many points are not finite numbers and so cannot be drawn."""
    return sum(isinstance(value, str) for values in plot.series.values() for value in values)


def _draw(axes: Axes, plot: PlotDoc) -> None:
    if plot.kind == "histogram":
        _histogram(axes, plot)
    elif plot.kind == "bar":
        _bars(axes, plot)
    elif plot.kind == "timeline":
        draw_timeline(axes, plot, PALETTE, _MARKERS, _INK)
        return
    else:
        _lines(axes, plot)
    if isinstance(plot.limit, int | float):
        axes.axhline(plot.limit, color=_INK, linewidth=1, linestyle="--", label=f"limit {plot.limit:g}")
    numeric = plot.kind != "bar" and _all_numbers(plot.x)
    if plot.log_x and numeric:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    if plot.log_y:
        # A bar starts at zero, which a logarithmic axis has not; masked, the whole bar would be gone.
        axes.set_yscale("log", nonpositive="mask" if plot.kind == "line" else "clip")
        _plain_ticks(axes.yaxis)
    if plot.kind == "line" and numeric and len(plot.x) <= _MOST_TICKS:
        axes.set_xticks([float(x) for x in plot.x])
        axes.xaxis.set_minor_locator(NullLocator())


def _plain_ticks(axis: Axis) -> None:
    """Decades as plain numbers: their usual form is mathematical markup, which is switched off here."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    low, high = axis.get_view_interval()
    axis.set_major_formatter(plain)
    # An axis of little more than a decade has hardly a decade mark to label.
    axis.set_minor_formatter(plain if high < _FEW_DECADES * low else NullFormatter())


def _lines(axes: Axes, plot: PlotDoc) -> None:
    numeric = _all_numbers(plot.x)
    places: list[float] = [float(x) for x in plot.x] if numeric else list(range(len(plot.x)))
    for index, (name, values) in enumerate(plot.series.items()):
        axes.plot(
            places,
            [_drawable(value) for value in values],
            label=_label(name),
            color=PALETTE[index % len(PALETTE)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linestyle=("-", "--", ":", "-.")[index // len(PALETTE) % 4],
        )
    if not numeric:
        _name_places(axes, plot)


def _bars(axes: Axes, plot: PlotDoc) -> None:
    width = 0.8 / max(1, len(plot.series))
    for index, (name, values) in enumerate(plot.series.items()):
        shift = (index - (len(plot.series) - 1) / 2) * width
        axes.bar(
            [place + shift for place in range(len(plot.x))],
            [_drawable(value) for value in values],
            width=width,
            label=_label(name),
            color=PALETTE[index % len(PALETTE)],
        )
    _name_places(axes, plot)


def _histogram(axes: Axes, plot: PlotDoc) -> None:
    if not _all_numbers(plot.x):
        raise ValueError(f"histogram {plot.title!r}: the bin edges must be numbers")
    edges = [float(x) for x in plot.x]
    for index, (name, values) in enumerate(plot.series.items()):
        axes.stairs(
            [_drawable(value) for value in values],
            edges,
            label=_label(name),
            color=PALETTE[index % len(PALETTE)],
            fill=len(plot.series) == 1,
            linewidth=1.5,
        )


def _name_places(axes: Axes, plot: PlotDoc) -> None:
    """Label the places 0, 1, 2 ... with the values of x, thinned out when there are too many to read."""
    labels = _place_labels(plot)
    if _crowded(plot):
        axes.set_xticks(list(labels), list(labels.values()), rotation=45, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(list(labels), list(labels.values()))


def _place_labels(plot: PlotDoc) -> dict[int, str]:
    step = math.ceil(len(plot.x) / _MOST_LABELS) or 1
    return {place: shortened(_label(str(plot.x[place])), 20) for place in range(0, len(plot.x), step)}


def _crowded(plot: PlotDoc) -> bool:
    """Whether the places have names that fit below the axis only at a slant."""
    named = plot.kind == "bar" or not _all_numbers(plot.x)
    return named and sum(map(len, _place_labels(plot).values())) > 70


def _all_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _drawable(value: float | str | None) -> float:
    return value if isinstance(value, int | float) else math.nan


def _label(text: str) -> str:
    # A leading underscore would hide a series from matplotlib's legend.
    line = shortened(visible_line(text), _LONGEST_LABEL)
    return f" {line}" if line.startswith("_") else line


def _tidy(document: str, title: str) -> str:
    """Only the `<svg>` element, sized by the page, named for screen readers, in the colour of the page's text."""
    element = document[document.index("<svg") :]
    element = re.sub(r'<g id="[A-Za-z0-9_.]+"', "<g", element)
    element = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", element, count=1)
    element = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", element, count=1, flags=re.DOTALL)
    element = re.sub(r'font-family: [^;"]*', "font-family: system-ui, sans-serif", element)
    lines = "stroke-linejoin: round; stroke-linecap: butt"
    name = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    element = element.replace("<svg ", f'<svg role="img" aria-label="{name}" style="{lines}" ', 1)
    return element.replace(_INK, "currentColor")
