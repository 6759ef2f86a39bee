"""The run record: what was judged, by whom, with what outcome. One pydantic model, one JSON schema.

`stable` holds everything that the seed determines; two runs of one seed, code and machine agree in it byte for byte.
`run` holds what differs from run to run: id, times, command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, StrictInt, StrictStr, model_validator

from validation.faults.base import Fault
from validation.gates.base import Gate, GateResult
from validation.records.jsonio import canonical, in_order, named
from validation.targets.base import ArmConfig, Counters
from validation.verdict import Verdict

SCHEMA_VERSION: Literal[1] = 1

NonFinite = Literal["NaN", "Infinity", "-Infinity"]
Cell = StrictStr | StrictInt | FiniteFloat
Point = Annotated[StrictInt | FiniteFloat | NonFinite | None, "a number, the name of a non-finite one, or a gap"]


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FindingDoc(_Doc):
    """One reason for a verdict."""

    component: str
    message: str
    unit: str = ""


class TableDoc(_Doc):
    """A table of the report; a brief one is in the Markdown summary too."""

    title: str
    header: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    brief: bool = False

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"table {self.title!r}: every row needs {len(self.header)} cells, as its header has")
        return self


class PlotDoc(_Doc):
    """A chart of the report, as data."""

    title: str
    kind: Literal["line", "bar", "histogram", "timeline"]
    x: list[Cell]
    series: dict[str, list[Point]] = Field(min_length=1)
    x_label: str
    y_label: str
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    limit: Point = None

    @model_validator(mode="after")
    def _matching(self) -> Self:
        points = len(self.x) - (self.kind == "histogram")
        if any(len(values) != points for values in self.series.values()):
            raise ValueError(f"plot {self.title!r}: every series needs {points} values")
        return self


class GateDoc(_Doc):
    """A gate's question, its verdict and its evidence.

    `counts_as` is what the gate contributed to the run's verdict; None when it had no say.
    """

    name: str
    layer: int
    question: str
    cost: str
    needs: list[str]
    required: bool
    verdict: Verdict
    counts_as: Verdict | None
    summary: str
    units: list[str] = []
    findings: list[FindingDoc] = []
    metrics: dict[str, JsonValue] = {}
    tables: list[TableDoc] = []
    plots: list[PlotDoc] = []


class ArmUse(_Doc):
    """Steps by path and fallbacks by reason of one arm."""

    steps: dict[str, int] = {}
    fallbacks: dict[str, int] = {}


class FaultDoc(_Doc):
    """A fault that was put into the candidate on purpose."""

    id: str
    title: str
    component: str


class ProfileDoc(_Doc):
    """The profile as used, with the command line's overrides applied."""

    name: str
    content: dict[str, JsonValue]


class TargetDoc(_Doc):
    """What was judged."""

    kind: str
    name: str
    fingerprint: dict[str, str]


class Environment(_Doc):
    """The machine and the software that judged. `data_sha256` is the digest of the data that ships in the package."""

    python: str
    torch: str
    platform: str
    cpu_count: int
    threads: int
    accelerator: str | None = None
    driver: str | None = None
    processor: str | None = None
    packages: dict[str, str] = {}
    data_sha256: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None


class RunInfo(_Doc):
    """What differs between two runs of the same thing. `seconds` is the time of each unit, by gate."""

    id: str
    created: str
    finished: str | None = None
    command: list[str] = []
    exit_code: int | None = None
    seconds: dict[str, dict[str, float]] = {}


class Stable(_Doc):
    """What the seed determines."""

    decodegate: str
    seed: int
    profile: ProfileDoc
    selected: list[str] | None
    keep_going: bool
    target: TargetDoc
    arms: dict[str, dict[str, JsonValue]]
    faults: list[FaultDoc]
    gates: list[GateDoc] = []
    counters: dict[str, ArmUse] = {}
    not_judged: dict[str, str] = {}
    verdict: Verdict | None = None


class RunRecord(_Doc):
    """The whole of `record.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    status: Literal["running", "finished"] = "running"
    run: RunInfo
    environment: Environment
    stable: Stable


class UnitResult(_Doc):
    """What one finished unit yielded. `identity` is the digest of everything the result depends on."""

    gate: str
    unit: str
    identity: str
    result: dict[str, JsonValue]
    arms: dict[str, ArmUse]
    seconds: float


class UnitRecord(_Doc):
    """A unit's file: its content and the SHA-256 of the content's canonical JSON."""

    schema_version: Literal[1] = SCHEMA_VERSION
    sha256: str
    content: UnitResult


def stable_bytes(record: RunRecord) -> bytes:
    """The bytes in which two runs of one seed must agree."""
    return canonical(record.stable.model_dump(mode="json"))


def arm_doc(arm: ArmConfig) -> dict[str, JsonValue]:
    """An arm's configuration, its faults by id; without what only a bisection asks of an arm."""
    apart = ("faults", "substitutions", "boundaries")
    fields: dict[str, JsonValue] = {
        field.name: getattr(arm, field.name) for field in dataclasses.fields(arm) if field.name not in apart
    }
    return {**fields, "faults": [fault.id for fault in arm.faults]}


def fault_doc(fault: Fault) -> FaultDoc:
    """A fault without its code."""
    return FaultDoc(id=fault.id, title=fault.title, component=fault.component)


def gate_doc(gate: Gate, result: GateResult, *, required: bool, units: list[str]) -> GateDoc:
    """A gate's result as it is recorded. Non-finite numbers become their names.

    Raises:
        TypeError, ValueError: the result holds something that is not plain JSON, or does not fit together.
    """
    if result.gate != gate.name:
        raise ValueError(f"gate {gate.name!r} returned the result of gate {result.gate!r}")
    evidence = {
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
        "metrics": result.metrics,
        "tables": [dataclasses.asdict(table) for table in result.tables],
        "plots": [dataclasses.asdict(plot) for plot in result.plots],
    }
    plain = named(evidence)
    return GateDoc(
        name=gate.name,
        layer=gate.layer,
        question=gate.question,
        cost=gate.cost,
        needs=sorted(need.value for need in gate.needs),
        required=required,
        verdict=result.verdict,
        counts_as=None,
        summary=result.summary,
        units=units,
        **{**plain, "metrics": in_order(plain["metrics"])},
    )


def counters_doc(counters: Counters) -> ArmUse:
    """An arm's counters, as they are recorded."""
    return ArmUse(steps=dict(counters.steps), fallbacks=dict(counters.fallbacks))


def added(left: Mapping[str, ArmUse], right: Mapping[str, ArmUse]) -> dict[str, ArmUse]:
    """Counters of two stretches of work, summed by arm; keys sorted."""
    return {
        arm: ArmUse(
            steps=_sum(*(counters[arm].steps for counters in (left, right) if arm in counters)),
            fallbacks=_sum(*(counters[arm].fallbacks for counters in (left, right) if arm in counters)),
        )
        for arm in sorted({*left, *right})
    }


def _sum(*counts: Mapping[str, int]) -> dict[str, int]:
    return {key: sum(count.get(key, 0) for count in counts) for key in sorted({key for c in counts for key in c})}
