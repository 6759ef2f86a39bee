"""Lines and tables on standard output, foreign text made visible."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from validation.reports.text import visible_line

_WIDTH = 200
"""Columns where standard output is no terminal."""


def say(line: str) -> None:
    """Print one line, however long, with its indentation."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    Console().print(Text(indent + visible_line(line)), soft_wrap=True)


def rows(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table; nothing where it has no rows."""
    if not cells:
        return
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=_WIDTH).print(table)
