"""Live progress: bars on a terminal, plain lines elsewhere. Progress never changes a result."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from validation.errors import one_line
from validation.records.record import GateDoc


class Progress(Protocol):
    """What the runner tells as it goes."""

    def gate_started(self, gate: str, total: int, done: int) -> None:
        """A gate begins with `done` of its `total` units already measured."""
        ...

    def unit_done(self, gate: str, unit: str) -> None:
        """One more unit was measured."""
        ...

    def gate_finished(self, doc: GateDoc, seconds: float) -> None:
        """The gate has a verdict; `seconds` is the time of all its units."""
        ...


class Silent:
    """Says nothing."""

    def gate_started(self, gate: str, total: int, done: int) -> None:
        """Nothing."""

    def unit_done(self, gate: str, unit: str) -> None:
        """Nothing."""

    def gate_finished(self, doc: GateDoc, seconds: float) -> None:
        """Nothing."""


class Lines:
    """One plain line when a gate begins and one when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def gate_started(self, gate: str, total: int, done: int) -> None:
        """`numerics: 84 units, 12 of them measured before`."""
        kept = f", {done} of them measured before" if done else ""
        self._say(f"{gate}: {total} units{kept}")

    def unit_done(self, gate: str, unit: str) -> None:
        """Nothing: a log is no place for a counter."""

    def gate_finished(self, doc: GateDoc, seconds: float) -> None:
        """`numerics: PASS after 12.3 s: summary`."""
        self._say(f"{doc.name}: {doc.verdict} after {seconds:.1f} s: {one_line(doc.summary)}")

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class Live:
    """A bar per gate with units done, units in all and time elapsed. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, transient=True)
        self._lines = Lines(console)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def gate_started(self, gate: str, total: int, done: int) -> None:
        """Show the gate's bar."""
        self._task = self._bars.add_task(gate, total=total, completed=done)

    def unit_done(self, gate: str, unit: str) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._bars.advance(self._task)

    def refresh(self) -> None:
        """Draw now instead of at the next tick."""
        self._bars.refresh()

    def gate_finished(self, doc: GateDoc, seconds: float) -> None:
        """Put a line with the verdict in the place of the bar."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._lines.gate_finished(doc, seconds)
