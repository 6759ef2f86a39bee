"""What the history keeps of a run, and which runs belong to one series."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from validation.errors import UsageError
from validation.files import read_limited
from validation.records.jsonio import digest
from validation.records.metrics import flat
from validation.records.reading import LARGEST_RECORD
from validation.records.record import RunRecord
from validation.records.storage import RECORD, RunFolder

MOST_FIGURES = 20_000
"""Figures kept of a gate. The numerics gate has about 300; a gate beyond this lists cases, not metrics."""

_CASES = "failing_cases"
"""Metrics of this name are inputs to measure again, not figures."""


@dataclass(frozen=True)
class GateEntry:
    """A gate's verdict and its one sentence."""

    verdict: str
    summary: str


@dataclass(frozen=True)
class Entry:
    """One run. `series` is the digest of everything but code and seed that its figures depend on."""

    id: str
    sha256: str
    series: str
    created: str
    profile: str
    verdict: str
    faults: tuple[str, ...]
    about: Mapping[str, Any]
    gates: Mapping[str, GateEntry]
    figures: Mapping[tuple[str, str], float]


def entry_of(folder: RunFolder) -> Entry:
    """The entry of a finished run.

    Raises:
        UsageError: the record cannot be read, or the run is not finished.
    """
    record = folder.read_record()
    if record.status != "finished" or record.stable.verdict is None:
        raise UsageError(f"run {record.run.id!r} is not finished; resume it first")
    data = read_limited(folder.file(RECORD), LARGEST_RECORD, "run record")
    context = about(record)
    return Entry(
        id=record.run.id,
        sha256=hashlib.sha256(data).hexdigest(),
        series=digest(context["series"]),
        created=record.run.created,
        profile=record.stable.profile.name,
        verdict=record.stable.verdict.value,
        faults=tuple(fault.id for fault in record.stable.faults),
        about=context,
        gates={gate.name: GateEntry(gate.verdict.value, gate.summary) for gate in record.stable.gates},
        figures=_figures(record),
    )


def about(record: RunRecord) -> dict[str, dict[str, Any]]:
    """`series`: what must agree for figures to be of one series; `run`: what may differ inside one."""
    stable, here = record.stable, record.environment
    gates: Any = stable.profile.content["gates"]
    series = {
        "profile": stable.profile.name,
        "selected": stable.selected,
        "target": {"kind": stable.target.kind, **stable.target.fingerprint},
        "accelerator": here.accelerator,
        **{f"{name} arm": arm for name, arm in stable.arms.items()},
        **{f"settings of {gate}": _settings(table) for gate, table in gates.items()},
    }
    run = {
        "seed": stable.seed,
        "decodegate": stable.decodegate,
        "commit": here.git_commit,
        "uncommitted changes": here.git_dirty,
        "python": here.python,
        "processor": here.processor,
        "threads": here.threads,
        "driver": here.driver,
        **here.packages,
    }
    # Faults are put into the candidate's arm; a run with one is of its own series.
    return {"series": series, "run": run}


def _settings(table: Any) -> Any:
    return {key: value for key, value in table.items() if key != "replay"} if isinstance(table, dict) else table


def _figures(record: RunRecord) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for gate in record.stable.gates:
        numbers = [(name, value) for name, value in flat(gate.metrics).items() if not name.startswith(_CASES)]
        found |= {(gate.name, name): value for name, value in numbers[:MOST_FIGURES]}
        found[gate.name, "seconds"] = sum(record.run.seconds.get(gate.name, {}).values())
    return found
