"""The detection matrix as HTML and Markdown, written from the matrix alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from validation.mutation.matrix import Matrix, Outcome, Row
from validation.records.storage import RunFolder
from validation.reports.html import TEMPLATES, environment
from validation.reports.text import markdown, shortened

MARKS = {"caught": "✓", "missed": "✗", "cannot see it": "·", "error": "!", "": " "}
"""What a gate said, as one sign; a blank where it was not asked."""

_text = partial(lambda text, longest: markdown(shortened(text, longest)), longest=400)

ORDER = (
    Outcome.MISSED,
    Outcome.CONTRADICTED,
    Outcome.ERROR,
    Outcome.CAUGHT,
    Outcome.GATE_MISSING,
    Outcome.EQUIVALENT,
    Outcome.NOT_APPLICABLE,
)


def write_matrix(folder: RunFolder, matrix: Matrix) -> Path:
    """Write `matrix.html` and `matrix.md` beside `matrix.json`; the path of the page comes back.

    Raises:
        UsageError: the run's folder cannot be written.
    """
    folder.write(render_markdown(matrix).encode(), "matrix.md")
    folder.write(render_html(matrix).encode(), "matrix.html")
    return folder.file("matrix.html")


def headline(matrix: Matrix) -> str:
    """The decision in one line."""
    if not matrix.sound:
        red = [f"{gate} {said['says']}" for gate, said in matrix.healthy.items() if said["says"] != "PASS"]
        return f"ERROR: not green without a fault ({', '.join(red) or 'nothing was measured'}), so nothing counts"
    counts = matrix.counts()
    bad = [f"{counts[o]} {o}" for o in (Outcome.MISSED, Outcome.CONTRADICTED, Outcome.ERROR) if counts[o]]
    return f"{matrix.score()} caught" + (f"; {', '.join(bad)}" if bad else "; none missed")


def says(row: Row, gate: str) -> str:
    """What a gate said about a fault; empty where it was not asked."""
    return str(row.said.get(gate, {}).get("says", ""))


def why(row: Row) -> str:
    """The finding that caught a fault, or why it was not caught."""
    caught = [answer["reason"] for answer in row.said.values() if answer["says"] == "caught"]
    return row.note or (caught[0] if caught else "")


def layers(matrix: Matrix) -> Iterator[tuple[str, list[Row]]]:
    """Rows by layer, in the catalogue's order."""
    names = list(dict.fromkeys(row.layer for row in matrix.rows))
    for name in names:
        yield name, [row for row in matrix.rows if row.layer == name]


def open_rows(matrix: Matrix) -> list[Row]:
    """Faults that nobody caught although someone should."""
    return [row for row in matrix.rows if row.outcome in (Outcome.MISSED, Outcome.CONTRADICTED, Outcome.ERROR)]


def render_markdown(matrix: Matrix) -> str:
    """The matrix as Markdown: decision, scores, what was missed, and a table per layer."""
    lines = [f"## Detection matrix: {_text(headline(matrix))}", "", *_about(matrix), *_scores(matrix)]
    missed = open_rows(matrix)
    if missed:
        lines += ["### Not caught", ""]
        lines += [f"- `{row.fault}` ({row.outcome}): {_text(row.title)}. {_text(why(row))}" for row in missed]
        lines.append("")
    for name, rows in layers(matrix):
        lines += [f"### {_text(name)}", "", *_table(matrix, rows), ""]
    lines.append("✓ caught · ✗ missed · `·` the gate does not look at this component · `!` the machinery broke")
    return "\n".join(lines) + "\n"


def _about(matrix: Matrix) -> list[str]:
    about: Any = matrix.about
    if not about:
        return []
    where = about.get("environment", {})
    line = (
        f"{_text(str(about.get('created', '')))}, profile {_text(str(about.get('profile', '')))}, seed "
        f"{about.get('seed', 0)}, model {_text(str(about.get('target', {}).get('model', '')))}, "
        f"torch {_text(str(where.get('torch', '')))}, {_text(str(where.get('platform', '')))}"
    )
    command = str(about.get("command", "")).replace("`", "'")
    return [line, "", f"    {command}", ""]


def _scores(matrix: Matrix) -> list[str]:
    lines = ["| gate | caught of those it can see | without a fault |", "|---|--:|---|"]
    for gate in matrix.gates:
        healthy = matrix.healthy.get(gate, {})
        lines.append(f"| {_text(gate)} | {matrix.score(gate)} | {_text(str(healthy.get('says', 'not run')))} |")
    lines.append(f"| all | {matrix.score()} | |")
    counts = ", ".join(f"{count} {name}" for name, count in matrix.counts().items() if count)
    return [*lines, "", f"{len(matrix.rows)} faults: {counts}.", ""]


def _table(matrix: Matrix, rows: list[Row]) -> list[str]:
    gates = " | ".join(_text(gate) for gate in matrix.gates)
    lines = [f"| fault | what is wrong | {gates} | outcome |", f"|---|---|{':-:|' * len(matrix.gates)}---|"]
    for row in rows:
        marks = " | ".join(MARKS.get(says(row, gate), "?") for gate in matrix.gates)
        lines.append(f"| `{row.fault}` | {_text(row.title)} | {marks} | {row.outcome} |")
    return lines


def render_html(matrix: Matrix) -> str:
    """The matrix as one page without scripts or outside references."""
    page = environment().get_template("matrix.html.j2")
    return page.render(
        matrix=matrix,
        headline=headline(matrix),
        verdict_class="error" if not matrix.sound else "pass" if matrix.passed else "fail",
        layers=list(layers(matrix)),
        missed=open_rows(matrix),
        says=says,
        why=why,
        marks=MARKS,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
    )
