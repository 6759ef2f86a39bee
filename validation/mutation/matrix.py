"""The detection matrix: what every gate says about every fault, the outcome of each, and the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from validation.faults.base import Fault
from validation.gates.base import Json
from validation.mutation.measure import BLIND, CAUGHT, ERROR, MISSED
from validation.records.jsonio import canonical


class Outcome(StrEnum):
    """What came of a fault, all gates together."""

    CAUGHT = "caught"
    MISSED = "missed"
    EQUIVALENT = "equivalent"
    NOT_APPLICABLE = "not applicable"
    GATE_MISSING = "gate missing"
    CONTRADICTED = "contradicted"
    ERROR = "error"


@dataclass(frozen=True)
class Row:
    """One fault: its outcome, and what each gate asked said (`caught`, `missed`, `cannot see it`, `error`)."""

    fault: str
    title: str
    layer: str
    kind: str
    component: str
    sources: tuple[str, ...]
    expected: str
    missed_by: str
    outcome: Outcome
    said: Mapping[str, Json] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Score:
    """Of the faults that a gate can see, how many it caught."""

    caught: int
    asked: int

    @property
    def share(self) -> float | None:
        """None where nothing was asked."""
        return self.caught / self.asked if self.asked else None

    def __str__(self) -> str:
        return f"{self.caught} of {self.asked}" + (f" ({self.share:.0%})" if self.share is not None else "")


@dataclass(frozen=True)
class Matrix:
    """All rows of one measurement. `healthy` is what the gates said without a fault; all must be PASS.

    `seconds`: by fault and gate, apart from the rest because they differ from run to run.
    """

    gates: tuple[str, ...]
    rows: tuple[Row, ...]
    healthy: Mapping[str, Json]
    about: Mapping[str, Json] = field(default_factory=dict)
    seconds: Mapping[str, Json] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether the gates were green without a fault: only then do their findings mean anything."""
        return bool(self.healthy) and all(said["says"] == "PASS" for said in self.healthy.values())

    def score(self, gate: str | None = None) -> Score:
        """Of one gate over the faults that it can see, or of all gates over the faults that apply.

        Equivalent faults, and those whose gate is missing, count nowhere.
        """
        rows = [row for row in self.rows if row.outcome in (Outcome.CAUGHT, Outcome.MISSED, Outcome.ERROR)]
        if gate is None:
            return Score(sum(row.outcome is Outcome.CAUGHT for row in rows), len(rows))
        says = [row.said[gate]["says"] for row in rows if gate in row.said]
        return Score(says.count(CAUGHT), sum(word != BLIND for word in says))

    def counts(self) -> dict[str, int]:
        """Faults by outcome, every outcome named."""
        return {outcome.value: sum(row.outcome is outcome for row in self.rows) for outcome in Outcome}

    @property
    def passed(self) -> bool:
        """No applicable fault missed, no claim contradicted, nothing broken, and the healthy run green."""
        bad = (Outcome.MISSED, Outcome.CONTRADICTED, Outcome.ERROR)
        return self.sound and not any(row.outcome in bad for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        scores = {gate: asdict(self.score(gate)) for gate in self.gates}
        return {
            **self.about,
            "passed": self.passed,
            "sound": self.sound,
            "score": asdict(self.score()),
            "scores": scores,
            "counts": self.counts(),
            "healthy": dict(self.healthy),
            "rows": [{**asdict(row), "outcome": row.outcome.value} for row in self.rows],
            "seconds": dict(self.seconds),
        }


VARYING = ("run", "created", "seconds")
"""What differs between two measurements of one seed, code and machine; nothing else does."""


def stable_bytes(document: Mapping[str, Any]) -> bytes:
    """A matrix as JSON without what varies: the same bytes for the same seed, code and machine."""
    return canonical({key: value for key, value in document.items() if key not in VARYING})


def row_of(fault: Fault, said: Mapping[str, Json] | None, gates_here: Sequence[str]) -> Row:
    """The row of a fault from what the gates said; None for a fault that was not injected."""
    outcome, note = _outcome(fault, said or {}, gates_here)
    return Row(
        fault=fault.id,
        title=fault.title,
        layer=fault.layer,
        kind=fault.kind.value,
        component=fault.component,
        sources=fault.sources,
        expected=fault.gate,
        missed_by=fault.missed_by,
        outcome=outcome,
        said=dict(said or {}),
        note=note,
    )


def _outcome(fault: Fault, said: Mapping[str, Json], gates_here: Sequence[str]) -> tuple[Outcome, str]:
    says = [answer["says"] for answer in said.values()]
    if fault.not_applicable:
        return Outcome.NOT_APPLICABLE, fault.not_applicable
    if fault.equivalent:
        if CAUGHT in says:
            return Outcome.CONTRADICTED, f"said to be equivalent, but a gate sees it: {fault.equivalent}"
        return Outcome.EQUIVALENT, fault.equivalent
    broken = [answer["reason"] for answer in said.values() if answer.get("broken")]
    if broken:
        return Outcome.ERROR, broken[0]
    if CAUGHT in says:
        return Outcome.CAUGHT, ""
    if ERROR in says:
        return Outcome.ERROR, next(answer["reason"] for answer in said.values() if answer["says"] == ERROR)
    if not fault.injectable:
        return Outcome.GATE_MISSING, f"waits for the component {fault.component!r}"
    if fault.gate not in gates_here:
        return Outcome.GATE_MISSING, f"waits for the gate {fault.gate!r}, which was not asked or is not here yet"
    return (Outcome.MISSED, "") if MISSED in says else (Outcome.GATE_MISSING, f"gate {fault.gate!r} cannot see it")
