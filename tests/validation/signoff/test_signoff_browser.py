"""A sign-off in a real browser: no console errors, nothing fetched, and a PDF whose first page is the decision."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import decodegate_toy as toy
import pytest
from toy_commandline import CommandLine

from validation.records.record import RunRecord
from validation.signoff.decision import decide
from validation.signoff.document import render
from validation.signoff.folder import Case
from validation.signoff.policy import Policy

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> http://192.0.2.1/x {{ 7 * 7 }} \x1b[2J"


def page(record: RunRecord) -> str:
    policy = Policy(name=HOSTILE, required=["error", "costly", HOSTILE])
    decision = decide(policy, [record], None, datetime.now(UTC).date())
    return render(Case(policy, "policy.toml", (record,), None, decision, {"runs/x/y": "0" * 64}), None)


@pytest.fixture
def document(decodegate: CommandLine) -> Path:
    """The sign-off of a toy run whose texts are hostile."""
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    content = decodegate.record().model_dump()
    for gate in content["stable"]["gates"]:
        gate.update(summary=HOSTILE, question=HOSTILE)
        gate["findings"] = [{"component": HOSTILE, "message": HOSTILE, "unit": ""}]
    path = decodegate.folder / "signoff.html"
    path.write_text(page(RunRecord.model_validate(content)))
    return path


def test_hostile_text_is_shown_and_never_markup(document: Path) -> None:
    text = document.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "{{ 7 * 7 }}" in text
    assert "\x1b" not in text


def printed(page: Path) -> tuple[bytes, str]:
    """The page as a PDF, and what Chromium logged; console messages, and refusals of a policy, have CONSOLE in them."""
    pdf = page.with_suffix(".pdf")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-pdf-header-footer"]
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *words, f"--user-data-dir={page.parent / 'browser'}", f"--print-to-pdf={pdf}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return pdf.read_bytes(), done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_it_opens_without_console_errors_and_prints(document: Path, tmp_path: Path) -> None:
    pdf, log = printed(document)
    assert "CONSOLE" not in log
    assert pdf.startswith(b"%PDF")
    # The decision, then floors and environment, then the record's evidence each begin a page.
    assert len(re.findall(rb"/Type /Page\b", pdf)) >= 3
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen')</script>")
    assert "CONSOLE" in printed(broken)[1], "an error in the console would be seen"
