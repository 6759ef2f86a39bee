"""compute-sanitizer over the kernels at small named shapes, and what its reports say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SHAPES = ("small-1", "small-8")
"""Named shapes of `validation.sync.sanitized_ops`: every op at the tests' width, with one row and with eight."""

_LIMIT_S = 900
_HAZARD = re.compile(
    r"^========= (?P<message>(?:Invalid|Error|Warning|Barrier error|Uninitialized|Program hit|Race reported|"
    r"Potential|Leaked|Misaligned|Divergent|Unused).*)$"
)
_KERNEL = re.compile(r"^=========\s+(?:at|in)\s+(?:0x[0-9a-f]+ in )?(?P<kernel>[A-Za-z_][\w<>:, ]*)")
_TOTAL = re.compile(r"^========= (?:ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazard)")


@dataclass(frozen=True)
class Report:
    """One complaint of a tool: the kernel that it names, or the tool where it names none, and its first line."""

    kernel: str
    message: str


@dataclass(frozen=True)
class Parsed:
    """A tool's report: the complaints, and the number that its last line counts; None where that line is missing."""

    reports: tuple[Report, ...]
    total: int | None


def parse(tool: str, text: str) -> Parsed:
    """Read what compute-sanitizer printed."""
    reports: list[Report] = []
    total: int | None = None
    for line in text.splitlines():
        summed, hazard, kernel = _TOTAL.match(line), _HAZARD.match(line), _KERNEL.match(line)
        if summed:
            total = int(summed["errors"] or summed["hazards"] or 0)
        elif hazard:
            reports.append(Report(tool, f"{tool}: {hazard['message'].strip()}"))
        elif kernel and reports and reports[-1].kernel == tool:
            reports[-1] = Report(kernel["kernel"].strip(), reports[-1].message)
    return Parsed(tuple(reports), total)


def missing() -> str:
    """Why the sanitizers cannot run here; empty where they can."""
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on PATH (it comes with the CUDA toolkit)"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device is visible"


def sanitized() -> dict[str, Any]:
    """Run every tool over every shape, as plain JSON."""
    why = missing()
    if why:
        return {"skipped": why, "tools": [], "reports": []}
    tools, reports = [], []
    for tool in TOOLS:
        for shape in SHAPES:
            said, found = _run(tool, shape)
            tools.append({"tool": tool, "shape": shape, "said": said})
            reports += [asdict(report) for report in found]
    return {"skipped": "", "tools": tools, "reports": reports}


def _run(tool: str, shape: str) -> tuple[str, tuple[Report, ...]]:
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "validation.sync.sanitized_ops", shape]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {_LIMIT_S} s", (Report(tool, f"{tool} {shape}: no end within {_LIMIT_S} s"),)
    parsed = parse(tool, done.stdout + done.stderr)
    if parsed.total is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        return "no summary", (Report(tool, f"{tool} {shape}: ended with {done.returncode} and said {last[0][:200]}"),)
    if parsed.total and not parsed.reports:
        return f"{parsed.total} errors", (Report(tool, f"{tool} {shape}: {parsed.total} errors, none described"),)
    return ("clean" if not parsed.total else f"{parsed.total} errors"), parsed.reports
