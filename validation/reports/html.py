"""`report.html`: one file without scripts or outside references; the template engine escapes every text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from validation.records.jsonio import pretty
from validation.records.record import RunRecord
from validation.reports import plots, scope, text, wording

TEMPLATES = Path(__file__).parent / "templates"


def render(record: RunRecord, drawn: dict[str, list[str]]) -> str:
    """The record as HTML. `drawn` holds the SVG elements of each gate's plots, in order."""
    page = environment().get_template("report.html.j2")
    return page.render(
        record=record,
        stable=record.stable,
        run=record.run,
        drawn={gate: [Markup(svg) for svg in svgs] for gate, svgs in drawn.items()},
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        verdict_class=(record.stable.verdict or "running").lower(),
    )


@cache
def environment() -> Environment:
    """The template engine: every text is escaped, and shown with its unprintable characters."""
    engine = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    engine.globals.update(scope=scope, wording=wording, non_finite=plots.non_finite)
    engine.filters.update(cell=text.cell, duration=wording.duration, json=_json)
    return engine


def _visible(value: Any) -> Any:
    """Foreign text with its unprintable characters shown; markup of our own as it is."""
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _json(value: Any) -> str:
    return pretty(value).decode()
