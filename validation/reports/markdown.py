"""`summary.md`: the decision for a pull-request comment. Foreign text is shown as it is and cannot act as markup."""

from __future__ import annotations

from validation.records.record import GateDoc, RunRecord, TableDoc
from validation.reports import scope, wording
from validation.reports.text import cell, markdown, shortened, visible_line, whole_clauses

LONGEST = 60_000
"""Characters; GitHub refuses comments of more than 65,536."""

_MOST_FINDINGS = 10
_LONGEST_TEXT = 600


def render(record: RunRecord) -> str:
    """The record as Markdown of at most `LONGEST` characters."""
    lines = [*_head(record), *_gates(record), *_findings(record), *_tables(record), *_foot(record)]
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > LONGEST - 100:
            kept.append("\n… cut here; `report.html` has the rest.")
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _head(record: RunRecord) -> list[str]:
    stable = record.stable
    verdict = wording.headline(record)
    mark = wording.MARKS[stable.verdict] if stable.verdict is not None else "…"
    lines = [f"## {mark} decodegate: {verdict}", ""]
    warning = wording.fault_warning(record)
    if warning:
        lines += [f"> **{_text(warning)}**", ""]
    code = f" (exit code {record.run.exit_code})" if record.run.exit_code is not None else ""
    lines += [
        f"{wording.meaning(record)}{code}",
        "",
        f"Candidate `{_code(stable.arms['candidate']['decode_backend'])}` against baseline "
        f"`{_code(stable.arms['baseline']['decode_backend'])}` on {_text(wording.judged(record))}, "
        f"profile {_text(stable.profile.name)}, seed {stable.seed}.",
        "",
    ]
    if ran := scope.ran(record):
        lines += [f"{_text(ran)}.", ""]
    return lines


def _gates(record: RunRecord) -> list[str]:
    lines = ["| layer | gate | verdict | required | units | work | summary |", "|--:|---|---|---|--:|--:|---|"]
    for gate in record.stable.gates:
        cells = [
            str(gate.layer),
            _text(gate.name),
            f"{wording.MARKS[gate.verdict]} {gate.verdict}",
            "yes" if gate.required else "no",
            str(len(gate.units)),
            wording.duration(wording.seconds(record, gate.name)),
            markdown(whole_clauses(gate.summary, _LONGEST_TEXT, "report.html has the rest")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", _text(scope.work(record)), ""]


def _findings(record: RunRecord) -> list[str]:
    gates = [gate for gate in record.stable.gates if gate.findings]
    if not gates:
        return []
    lines = ["### Findings", ""]
    for gate in gates:
        lines += [_finding(gate, index) for index in range(min(len(gate.findings), _MOST_FINDINGS))]
        if len(gate.findings) > _MOST_FINDINGS:
            lines.append(f"- {len(gate.findings) - _MOST_FINDINGS} more of {_text(gate.name)} in `report.html`")
    return [*lines, ""]


def _finding(gate: GateDoc, index: int) -> str:
    finding = gate.findings[index]
    unit = f" (unit {_text(finding.unit)})" if finding.unit else ""
    return f"- **{_text(gate.name)}, {_text(finding.component)}**: {_text(finding.message)}{unit}"


def _tables(record: RunRecord) -> list[str]:
    brief = [table for gate in record.stable.gates for table in gate.tables if table.brief]
    return [line for table in brief for line in _table(table)]


def _table(table: TableDoc) -> list[str]:
    rows = [table.header, ["---"] * len(table.header), *([_text(cell(value)) for value in row] for row in table.rows)]
    rows[0] = [_text(name) for name in table.header]
    lines = [f"### {_text(table.title)}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return [*lines, _text(table.caption), ""] if table.caption else lines


def _foot(record: RunRecord) -> list[str]:
    lines = []
    if record.stable.not_judged:
        lines += ["### Not judged", ""]
        lines += [f"- {_text(name)}: {_text(why)}" for name, why in record.stable.not_judged.items()]
        lines.append("")
    lines += ["### Repeat", "", *_block(wording.command(record)), ""]
    lines.append(f"Full report: `report.html` of run `{_code(record.run.id)}`; figures: `record.json` beside it.")
    return lines


def _text(text: str) -> str:
    return markdown(shortened(text, _LONGEST_TEXT))


def _code(text: object) -> str:
    """Text inside a code span: a backtick would end it."""
    return visible_line(str(text)).replace("`", "'")


def _block(text: str) -> list[str]:
    """An indented code block, which no text can end."""
    return [f"    {visible_line(text)}"]
