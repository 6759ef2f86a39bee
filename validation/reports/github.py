"""What `--format github` adds: annotations on standard output, and the summary in the job's page."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from validation.errors import UsageError
from validation.records.record import RunRecord
from validation.reports import wording
from validation.reports.text import shortened, visible
from validation.verdict import Verdict

MOST = 10
"""GitHub shows ten annotations of each kind per step."""


def workflow_commands(record: RunRecord) -> list[str]:
    """Workflow commands: one per finding that counted, one per such gate without findings, and one with the verdict.

    Of each kind at most as many as GitHub shows; the last of more says how many there are.
    """
    said: dict[str, list[tuple[str, str]]] = {"error": [], "warning": []}
    for gate in wording.against(record):
        kind = "error" if gate.counts_as in (Verdict.FAIL, Verdict.ERROR) else "warning"
        reasons = [(finding.component, finding.message) for finding in gate.findings] or [("", gate.summary)]
        for component, message in reasons:
            title = f"decodegate {gate.name} {gate.verdict}" + (f": {component}" if component else "")
            said[kind].append((title, message))
    lines = []
    for kind, reasons in said.items():
        if len(reasons) > MOST:
            left = len(reasons) - (MOST - 1)
            reasons[MOST - 1 :] = [("decodegate", f"{left} more of this kind; report.html of the run has all of them")]
        lines += [command(kind, title, message) for title, message in reasons]
    return [*lines, command("notice", f"decodegate {wording.headline(record)}", wording.meaning(record))]


def command(kind: str, title: str, message: str) -> str:
    """One workflow command; nothing in its texts can end it or begin another."""
    return f"::{kind} title={_property(title)}::{_data(message)}"


@contextmanager
def no_commands(wanted: bool) -> Iterator[None]:
    """While inside, GitHub takes no line for a command: what is printed may quote a model's or a record's text."""
    if not wanted:
        yield
        return
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        yield
    finally:
        print(f"::{token}::", flush=True)


def publish_summary(markdown: str) -> None:
    """Append the summary to the file that `GITHUB_STEP_SUMMARY` names, where there is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown)
    except OSError as error:
        raise UsageError(f"GITHUB_STEP_SUMMARY names {path!r}, which cannot be written: {error.strerror}") from error


def _data(text: str) -> str:
    escaped = shortened(visible(text), 2000).replace("%", "%25")
    return escaped.replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
