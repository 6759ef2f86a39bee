"""Words and marks that every report uses alike. Nothing here decides; the record already says what was concluded."""

from __future__ import annotations

import shlex

from validation.records.record import GateDoc, RunRecord
from validation.verdict import Verdict

MARKS = {
    Verdict.PASS: "✔",
    Verdict.FAIL: "✖",
    Verdict.INCONCLUSIVE: "?",
    Verdict.SKIPPED: "-",
    Verdict.ERROR: "!",
}

MEANINGS = {
    Verdict.PASS: "Every required gate passed.",
    Verdict.FAIL: "The candidate is not shown to be as correct as the baseline.",
    Verdict.INCONCLUSIVE: "The evidence cannot carry a decision.",
    Verdict.ERROR: "The machinery broke; nothing was decided about the candidate.",
    Verdict.SKIPPED: "Nothing was judged.",
}

_GLANCE = 32
"""Characters; a digest is longer."""

UNFINISHED = "NOT FINISHED"
UNFINISHED_MEANING = "This run was stopped or is still going; resume it to get a verdict."


def headline(record: RunRecord) -> str:
    """The verdict in capitals."""
    return record.stable.verdict.value if record.stable.verdict is not None else UNFINISHED


def meaning(record: RunRecord) -> str:
    """What the verdict means, as a sentence."""
    verdict = record.stable.verdict
    return MEANINGS[verdict] if verdict is not None else UNFINISHED_MEANING


def against(record: RunRecord) -> list[GateDoc]:
    """The gates that kept the run from passing, in the order in which they ran."""
    return [gate for gate in record.stable.gates if gate.counts_as not in (None, Verdict.PASS)]


def compared(record: RunRecord) -> list[tuple[str, str, str, bool]]:
    """Rows `setting, baseline, candidate, differs` of the two arms' configurations."""
    baseline, candidate = record.stable.arms["baseline"], record.stable.arms["candidate"]
    return [
        (name.replace("_", " "), str(baseline.get(name, "")), str(value), baseline.get(name) != value)
        for name, value in candidate.items()
        if name not in ("name", "faults")
    ]


def judged(record: RunRecord) -> str:
    """What decoded: the target, and those parts of its fingerprint that a person can read at a glance."""
    target = record.stable.target
    parts = [f"{name} {value}" for name, value in target.fingerprint.items() if len(value) <= _GLANCE]
    return f"{target.name} ({', '.join(parts)})" if parts else target.name


def command(record: RunRecord, gate: str | None = None) -> str:
    """The command that repeats the run, or one gate of it."""
    words = list(record.run.command)
    if gate is not None:
        while "--gate" in words:
            place = words.index("--gate")
            del words[place : place + 2]
        words += ["--gate", gate]
    return shlex.join(words)


def fault_warning(record: RunRecord) -> str:
    """What to say when faults were injected on purpose; empty otherwise."""
    faults = record.stable.faults
    if not faults:
        return ""
    names = ", ".join(fault.id for fault in faults)
    return f"FAULT INJECTED ON PURPOSE: {names}. This run tests the gates; it says nothing about the real candidate."


def seconds(record: RunRecord, gate: str) -> float:
    """Time that the gate's units took."""
    return sum(record.run.seconds.get(gate, {}).values())


def duration(value: float) -> str:
    """A duration for people: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if 0 < value < 0.05:
        return "< 0.1 s"
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
