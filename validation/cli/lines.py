"""Lines for people, printed as they are: no markup, no wrapping."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, line: str) -> None:
    """Print one line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
