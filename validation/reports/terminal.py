"""The end of a run on the terminal: verdict, gates, first findings, and where the report is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from validation.records.record import RunRecord
from validation.reports import scope, wording
from validation.reports.text import visible_line, whole_clauses
from validation.verdict import Verdict

_COLOURS = {
    Verdict.PASS: "green",
    Verdict.FAIL: "red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.SKIPPED: "bright_black",
    Verdict.ERROR: "magenta",
}
_MOST_FINDINGS = 5
_LONGEST_SUMMARY = 1000
"""Characters; what gates say is a third of it, the text of an error may have any length."""


def show(record: RunRecord, report: Path, console: Console) -> None:
    """Print the summary of a run."""
    warning = wording.fault_warning(record)
    if warning:
        _say(console, warning, "bold red")
    console.print(_table(record))
    for line in _about(record):
        _say(console, f"  {line}", "bright_black")
    for gate in wording.against(record):
        for finding in gate.findings[:_MOST_FINDINGS]:
            _say(console, f"  {gate.name}, {finding.component}: {finding.message}")
        more = len(gate.findings) - _MOST_FINDINGS
        if more > 0:
            _say(console, f"  {gate.name}: {more} more in the report")
    for name, why in record.stable.not_judged.items():
        _say(console, f"  not judged: {name} ({why})", "bright_black")
    verdict = record.stable.verdict
    colour = _COLOURS[verdict] if verdict is not None else "yellow"
    code = f" (exit code {record.run.exit_code})" if record.run.exit_code is not None else ""
    _say(console, f"{wording.headline(record)}: {wording.meaning(record)}{code}", f"bold {colour}")
    _say(console, f"report: {report}")


def _about(record: RunRecord) -> list[str]:
    """What decoded, which of its steps ran generic and why, and how long the run took."""
    ran = scope.ran(record)
    return [f"judged: {wording.judged(record)}", *([f"ran: {ran}"] if ran else []), scope.work(record)]


def _table(record: RunRecord) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("layer", "right"), ("gate", "left"), ("verdict", "left"), ("units", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("work", justify="right", no_wrap=True)
    table.add_column("summary", overflow="fold")
    for gate in record.stable.gates:
        table.add_row(
            str(gate.layer),
            Text(visible_line(gate.name)),
            Text(f"{wording.MARKS[gate.verdict]} {gate.verdict}", style=_COLOURS[gate.verdict]),
            str(len(gate.units)),
            wording.duration(wording.seconds(record, gate.name)),
            Text(whole_clauses(visible_line(gate.summary), _LONGEST_SUMMARY, "the report has the rest")),
        )
    return table


def _say(console: Console, line: str, style: str = "") -> None:
    indent = line[: len(line) - len(line.lstrip(" "))]
    console.print(Text(indent + visible_line(line), style=style), soft_wrap=True)
