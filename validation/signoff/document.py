"""`signoff.html`: a decision on one page, then the evidence. No scripts, nothing from outside, no deciding."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from validation.records.jsonio import canonical
from validation.records.metrics import flat
from validation.records.record import GateDoc, PlotDoc, RunRecord
from validation.reports import plots, wording
from validation.reports.html import TEMPLATES, environment
from validation.reports.scope import EMULATION
from validation.reports.text import visible_line, whole_clauses
from validation.signoff.folder import Case
from validation.signoff.ruling import Outcome
from validation.verdict import Verdict

MOST_ROWS = 40
"""Rows of a table and findings of a gate that the document shows; the run's own report has all of them."""

LONGEST_SAID = 600
"""Characters of a ruling that the decision shows: a gate's summary of two records, so that it stays on one page."""

MEANINGS = {
    Outcome.GO: "Every demand of the policy is met.",
    Outcome.NO_GO: "A demand of the policy is not met.",
    Outcome.INCONCLUSIVE: "The evidence cannot carry the decision.",
}
_CLASSES = {Outcome.GO: "pass", Outcome.NO_GO: "fail", Outcome.INCONCLUSIVE: "inconclusive"}
LAYERS = {
    1: "each op's accuracy",
    2: "next-token predictions and state",
    3: "races between ranks",
    4: "long answers",
    5: "evals",
}
"""What a gate of each layer asks about; a layer without a gate that decided is said to be missing."""

_ORDER = {Outcome.NO_GO: 0, Outcome.INCONCLUSIVE: 1, Outcome.GO: 2}
_MARKS = {Outcome.GO: "✔", Outcome.NO_GO: "✖", Outcome.INCONCLUSIVE: "?"}


def render(case: Case, signed_by: str | None) -> str:
    """The document. `signed_by` is the signing key's id; None says in red that nobody signed."""
    page = environment().get_template("signoff.html.j2")
    decision = case.decision
    return page.render(
        case=case,
        decision=decision,
        meaning=MEANINGS[decision.outcome] + (" Some only by a waiver." if decision.waived else ""),
        rulings=sorted(decision.rulings, key=lambda r: (_ORDER[r.outcome], not r.waivers)),
        marks=_MARKS,
        classes=_CLASSES,
        signed_by=signed_by,
        expired=[(ruling.subject, note) for ruling in decision.rulings for note in ruling.notes],
        not_judged=not_judged(case.records),
        floors=noise_floors(case.records),
        fingerprint=fingerprint(case.records),
        drawn={(i, gate.name): _drawn(i, gate) for i, r in enumerate(case.records) for gate in r.stable.gates},
        most=MOST_ROWS,
        compact=lambda value: canonical(value).decode(),
        first=_first,
        with_n=with_n,
        style=Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "signoff.css"))),
    )


def _first(said: str) -> str:
    """What the evidence says, whole or in whole clauses."""
    return whole_clauses(visible_line(said), LONGEST_SAID, "the evidence below has the rest")


def _drawn(index: int, gate: GateDoc) -> list[Markup]:
    return [Markup(plots.svg(plot, f"{index}-{gate.name}-{i}")) for i, plot in enumerate(gate.plots)]


def with_n(plot: PlotDoc, gate: GateDoc) -> str:
    """A chart's caption, which always says how much was measured."""
    caption = plot.caption.rstrip(". ")
    measured = f"The gate measured n = {len(gate.units)} units"
    return caption if "n = " in caption else ". ".join(filter(None, (caption, measured)))


def not_judged(records: Sequence[RunRecord]) -> dict[str, str]:
    """Gates and layers that no record judged, and why not; and kernels of which only the emulation ran."""
    docs = [gate for r in records for gate in r.stable.gates if gate.name not in r.stable.not_judged]
    judged = {gate.name for gate in docs}
    seen = {gate.layer for gate in docs if gate.verdict in (Verdict.PASS, Verdict.FAIL)}
    reasons = {what: f"no gate of layer {layer} decided" for layer, what in LAYERS.items() if layer not in seen}
    reasons["performance"] = "no gate asks about it; decodegate bench measures it, and no record holds what it found"
    ran = {record.stable.target.fingerprint.get("specialised path") for record in records}
    if ran == {EMULATION}:
        reasons["fused kernels"] = "their emulation ran; nothing is said about the kernels themselves"
    for record in records:
        for gate, why in record.stable.not_judged.items():
            if gate not in judged:
                said = f"{why} ({record.stable.profile.name})"
                reasons[gate] = f"{reasons[gate]}; {said}" if gate in reasons else said
    return reasons


def noise_floors(records: Sequence[RunRecord]) -> list[list[str | int | float]]:
    """A row `run, gate, figure, n, lowest, median, highest` per figure that its gate calls a floor."""
    rows: list[list[str | int | float]] = []
    for record in records:
        for gate in record.stable.gates:
            found: dict[str, list[float]] = {}
            for path, value in flat(gate.metrics).items():
                name = next((part for part in path.split(".") if "floor" in part), None)
                if name is not None:
                    found.setdefault(name, []).append(value)
            for name, values in found.items():
                figures = [min(values), statistics.median(values), max(values)]
                rows.append([record.stable.profile.name, gate.name, name, len(values), *(f"{v:.3g}" for v in figures)])
    return rows


def fingerprint(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Rows `what, [value of each record]`: hardware, software, code, weights and data, configuration, seeds."""
    columns = [_column(record) for record in records]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _column(record: RunRecord) -> dict[str, str]:
    here, stable = record.environment, record.stable
    dirty = {True: ", uncommitted changes", False: "", None: ""}[here.git_dirty]
    column: dict[str, Any] = {
        "profile": stable.profile.name,
        "seed": stable.seed,
        "run": f"{record.run.created} to {record.run.finished or 'not finished'}",
        "accelerator": here.accelerator or "none",
        "driver": here.driver or "none",
        "processor": f"{here.processor or 'unknown'}, {here.cpu_count} cores, {here.threads} torch threads",
        "system": here.platform,
        "Python, torch": f"{here.python}, {here.torch}",
        **dict(sorted(here.packages.items())),
        "decodegate": stable.decodegate,
        "commit": f"{here.git_commit or 'unknown'}{dirty}",
        **{f"target: {name}": value for name, value in stable.target.fingerprint.items()},
        "data (SHA-256)": here.data_sha256 or "unknown",
        **{f"both arms: {name}": a for name, a, b, differs in wording.compared(record) if not differs},
        **{
            f"arms differ: {name}": f"{a}, candidate {b}" for name, a, b, differs in wording.compared(record) if differs
        },
        "command": wording.command(record),
    }
    return {name: str(value) for name, value in column.items()}
