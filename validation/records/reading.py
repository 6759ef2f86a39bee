"""Reading a record that someone else may have written: whole, of this version, of a sane size, and at one with itself.

A record is read from a pull request's artifact or from an old disk. Whatever is wrong with it is one line and exit
code 2, and nothing is written where it lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from validation.errors import UsageError, one_line
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.names import is_safe_name
from validation.records.jsonio import require_keys_once
from validation.records.record import SCHEMA_VERSION, GateDoc, RunRecord
from validation.run.judging import counts_as, run_verdict
from validation.verdict import Verdict

LARGEST_RECORD = LARGEST_TEXT_FILE
"""Bytes. A premerge record has 70 KB and grows with findings and tables, so this is a thousand of them."""

LARGEST_NUMBER = 2**63
"""Whole numbers of a record stay below it; counters and seeds do, and larger ones cannot be plotted or stored."""


def _first_problem(error: ValidationError) -> str:
    """What pydantic objects to first, with its place, as one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return one_line(f"{where}: {first['msg']}" if where else first["msg"])


def objection(error: Exception) -> str:
    """Why a JSON file cannot be taken, as one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return _first_problem(error) if isinstance(error, ValidationError) else one_line(error)


def require_run_name(folder: Path, run: str) -> None:
    """Refuse a folder that does not have the name of the run in it: every other place names the run by its folder.

    Raises:
        UsageError: it has another name.
    """
    if folder.name != run:
        raise UsageError(f"folder {str(folder)!r} holds run {run!r}; give it the run's name again")


def read_run_record(path: Path) -> RunRecord:
    """The run record at `path`.

    Raises:
        UsageError: it cannot be read, is not a whole record of this schema version, or contradicts itself.
    """
    data = read_limited(path, LARGEST_RECORD, "run record", "start a new run")
    try:
        record = RunRecord.model_validate_json(data)
        require_keys_once(data)
    except (ValueError, RecursionError) as error:
        problem = _version_problem(error) or objection(error)
        raise UsageError(f"{str(path)!r} is not a whole run record: {problem}") from error
    contradiction = next(_contradictions(record), None)
    if contradiction is not None:
        raise UsageError(f"{str(path)!r} is not a whole run record: {one_line(contradiction)}")
    return record


def _version_problem(error: Exception) -> str | None:
    if not isinstance(error, ValidationError):
        return None
    for item in error.errors():
        if item["loc"] == ("schema_version",):
            given = one_line(json.dumps(item["input"]))[:20]
            kind = "" if isinstance(item["input"], int) else ", which is no whole number"
            reads = f"this decodegate reads the number {SCHEMA_VERSION}"
            return f"its schema_version is {given}{kind}; {reads}: use the decodegate that wrote it"
    return None


def _contradictions(record: RunRecord) -> Iterator[str]:
    """What no run of decodegate writes, although the schema allows it."""
    stable = record.stable
    for number in _numbers(record):
        if abs(number) >= LARGEST_NUMBER:
            yield "it holds a whole number of 2^63 or more"
            return
    if not is_safe_name(record.run.id):
        yield f"run.id {record.run.id!r} is not a run id"
    injected: dict[str, Any] = {"baseline": [], "candidate": [fault.id for fault in stable.faults]}
    for arm, faults in injected.items():
        if "decode_backend" not in stable.arms.get(arm, {}):
            yield f"stable.arms has no {arm} with a decode_backend"
        if stable.arms.get(arm, {}).get("faults", []) != faults:
            yield f"the {arm} has other faults than stable.faults says"
    content = stable.profile.content
    if not isinstance(content.get("description"), str) or not isinstance(content.get("gates"), dict):
        yield "stable.profile.content has no description or no gates"
        return
    names = [gate.name for gate in stable.gates]
    for gate in stable.gates:
        yield from _gate_contradictions(gate, content["gates"], names)
    done = record.status == "finished"
    if done != (stable.verdict is not None):
        yield f"its status is {record.status} and its verdict is {stable.verdict}"
    if done and run_verdict(stable.gates) is not stable.verdict:
        yield f"its verdict is {stable.verdict}, its gates make {run_verdict(stable.gates)}"


def _gate_contradictions(gate: GateDoc, settings: Any, names: list[str]) -> Iterator[str]:
    if not is_safe_name(gate.name) or names.count(gate.name) > 1:
        yield f"gate {gate.name!r} is there twice, or its name is not safe as a file name"
    if gate.name not in settings:
        yield f"gate {gate.name!r} is not in the profile that the record holds"
    if gate.counts_as not in _say(gate):
        yield f"gate {gate.name!r} is {gate.verdict} and counts as {gate.counts_as}"
    if gate.verdict is Verdict.PASS and not gate.units:
        yield f"gate {gate.name!r} passed without a unit"
    for plot in gate.plots:
        if plot.kind == "histogram" and not all(isinstance(edge, int | float) for edge in plot.x):
            yield f"plot {plot.title!r} is a histogram with bin edges that are no numbers"


def _say(gate: GateDoc) -> tuple[Verdict | None, ...]:
    """What the gate may count as; a required one that was not run, as what stopped it."""
    if gate.required and gate.verdict is Verdict.SKIPPED:
        return Verdict.FAIL, Verdict.ERROR
    return (counts_as(gate.verdict, required=gate.required),)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _numbers(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
