"""All reports of a run, written beside its record. They can be written again at any time from the record alone."""

from __future__ import annotations

from pathlib import Path

from validation.records.jsonio import pretty
from validation.records.record import RunRecord
from validation.records.replay_files import replay_files
from validation.records.storage import RunFolder
from validation.reports import html, junit, markdown, plots


def write_reports(folder: RunFolder, record: RunRecord) -> Path:
    """Write `report.html`, `junit.xml`, `summary.md`, `plots/*.svg` and `replays/*.json`; `report.html` comes back.

    Raises:
        UsageError: the run's folder cannot be written.
    """
    drawn: dict[str, list[str]] = {}
    for gate in record.stable.gates:
        drawn[gate.name] = []
        for index, plot in enumerate(gate.plots, start=1):
            name = f"{gate.name}-{index}"
            drawing = plots.svg(plot, name)
            drawn[gate.name].append(drawing)
            folder.write(drawing.encode(), "plots", f"{name}.svg")
    for name, content in replay_files(record):
        folder.write(pretty(content), "replays", f"{name}.json")
    folder.write(junit.render(record), "junit.xml")
    folder.write(markdown.render(record).encode(), "summary.md")
    folder.write(html.render(record, drawn).encode(), "report.html")
    return folder.file("report.html")
