"""A bench as JSON and Markdown. Rendering decides nothing; every table carries what its figures do not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from validation.bench.clock import Spread
from validation.bench.lines import Line
from validation.bench.settings import Settings
from validation.records.record import Environment

SCHEMA = 1
CPU_CAVEAT = "On a CPU the specialised arm is the EMULATION of its kernels: these times say nothing about a GPU."
SYNTHETIC_CAVEAT = (
    "SYNTHETIC acceptance: how many tokens a verify step commits is assumed, no draft was made or judged, and the "
    "drafter's time is not counted. No gate reads these figures."
)


@dataclass
class Report:
    """What was measured so far, where, and how."""

    environment: Environment
    settings: Settings
    model: str
    device: str
    implementation: str
    clock: str
    arms: dict[str, str]
    ceiling: dict[str, Spread] = field(default_factory=dict)
    weights_bytes: int = 0
    lines: list[Line] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def caveats(self) -> list[str]:
        """What a reader must know before any figure."""
        on_cpu = [CPU_CAVEAT] if self.implementation != "kernels" else []
        return on_cpu + ([SYNTHETIC_CAVEAT] if any(line.synthetic for line in self.lines) else [])

    def json(self) -> dict[str, Any]:
        """As plain JSON."""
        settings = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self.settings).items()}
        return {
            "kind": "decodegate bench",
            "schema": SCHEMA,
            "caveats": self.caveats,
            "environment": self.environment.model_dump(mode="json"),
            "device": self.device,
            "implementation": self.implementation,
            "model": self.model,
            "weights_bytes": self.weights_bytes,
            "settings": settings,
            "clock": self.clock,
            "order": "A B B A, A generic",
            "arms": self.arms,
            "ceiling_bytes_per_second": {name: spread.json() for name, spread in self.ceiling.items()},
            "lines": [line.json() for line in self.lines],
            "unmeasured": self.unmeasured,
            "seconds": self.seconds,
        }


HEADER = (
    *("line", "requests", "drafts", "unit", "generic", "specialised", "n", "times better"),
    *("GB", "least us", "of limit", "note"),
)


def cells(line: Line) -> list[str]:
    """One line of the table, as text."""
    name = f"{line.name} (SYNTHETIC acceptance)" if line.synthetic else line.name
    first, second = [*line.arms.values(), None, None][:2]
    shares = " / ".join(f"{share:.2f}" for share in line.limit.share.values()) if line.limit else ""
    arms = "" if tuple(line.arms) in ((), ("generic", "specialised")) else f"columns: {', '.join(line.arms)}; "
    return [
        name,
        str(line.requests or ""),
        str(line.drafts or ""),
        line.unit,
        spread_text(first),
        spread_text(second),
        str(first.n) if first else "",
        spread_text(line.speedup),
        f"{line.limit.bytes / 1e9:.3g}" if line.limit else "",
        f"{line.limit.least_us:.4g}" if line.limit else "",
        shares,
        f"NOT MEASURED: {line.error}" if line.error else arms + line.note,
    ]


def spread_text(spread: Spread | None) -> str:
    """Median and interquartile range."""
    return f"{spread.median:.4g} ({spread.q3 - spread.q1:.2g})" if spread else ""


def head(report: Report) -> list[str]:
    """What the figures are of, a sentence a line."""
    settings, environment = report.settings, report.environment
    ceiling = ", ".join(f"{name} {spread.median / 1e12:.3g} TB/s" for name, spread in report.ceiling.items())
    return [
        f"{report.model} on {report.device}, torch {environment.torch}, commit {environment.git_commit or 'unknown'}"
        f"{' with changes' if environment.git_dirty else ''}; {report.weights_bytes / 1e9:.3g} GB of weights, context "
        f"{settings.context}, FP8 latents, FP32 states, seed {settings.seed}, one process.",
        f"Generic: {report.arms.get('generic', '')}.",
        f"Specialised: {report.arms.get('specialised', '')}.",
        f"Ceiling of the memory, same run: {ceiling or 'not measured'}; the greater is the limit.",
        f"Clock: {report.clock}. Arms in turn, A B B A; median (interquartile range) of n readings of each; times "
        "better is the generic arm's time over the specialised one's, by rounds.",
        *report.caveats,
    ]


def markdown(report: Report) -> str:
    """The report as a page."""
    rows = [HEADER, ["---"] * len(HEADER), *(map(_cell, cells(line)) for line in report.lines)]
    table = [f"| {' | '.join(row)} |" for row in rows]
    missing = [f"- not measured, the budget was spent: {name}" for name in report.unmeasured]
    title = f"# decodegate bench: {report.model}"
    return "\n".join(
        [title, "", *_paragraphs(head(report)), *table, "", *missing, f"{report.seconds:.0f} s in all.", ""]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _paragraphs(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in (line, "")]
