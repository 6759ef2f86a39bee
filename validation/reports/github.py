"""What `--format github` adds: annotations on standard output, and the summary in the job's page."""

from __future__ import annotations

import os
from pathlib import Path

from validation.errors import UsageError
from validation.record import RunRecord
from validation.reports import wording
from validation.reports.text import shortened, visible
from validation.verdict import Verdict

_MOST = 10
"""GitHub shows ten annotations of each kind per step."""


def workflow_commands(record: RunRecord) -> list[str]:
    """Workflow commands, one per finding that counted, and one per such gate without findings."""
    lines = []
    for gate in wording.against(record):
        kind = "error" if gate.counts_as in (Verdict.FAIL, Verdict.ERROR) else "warning"
        reasons = [(finding.component, finding.message) for finding in gate.findings] or [("", gate.summary)]
        for component, message in reasons:
            title = f"decodegate {gate.name} {gate.verdict}" + (f": {component}" if component else "")
            lines.append(f"::{kind} title={_property(title)}::{_data(message)}")
    return lines[:_MOST]


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
