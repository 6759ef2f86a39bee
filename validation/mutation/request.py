"""What a mutation run was asked for, kept in its folder: a run that is resumed is asked for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from validation.errors import UsageError, one_line
from validation.gates.base import Json
from validation.records.jsonio import pretty
from validation.records.storage import RunFolder

FILE = "request.json"

OPTIONS = "options"
"""The key of the options of the command line in the file."""


_OF_THE_MACHINE = ("model", "version", "commit")
"""What no option of a resumption changes back."""


class Options(BaseModel):
    """The options that decide what is measured, under their names on the command line, and the profile as it was."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    profile: str = Field(alias="--profile")
    gates: list[str] = Field(alias="--gate")
    model: str | None = Field(alias="--model")
    faults: list[str] = Field(alias="--fault")
    seed: int = Field(alias="--seed", ge=0)
    threads: int = Field(alias="--threads", ge=1, le=256)
    stop_at_first: bool = Field(alias="--stop-at-first")
    content: dict[str, JsonValue] = Field(alias="content of the profile")


def started_with(folder: RunFolder, asked: Mapping[str, Json], resuming: bool) -> None:
    """Keep what a new run is asked for; compare it where a run is resumed. Nothing else in the folder is touched.

    Raises:
        UsageError: the folder is no mutation run's, or was started with something else.
    """
    if not resuming:
        folder.write(pretty(dict(asked)), FILE)
        return
    before = _read(folder)
    # Both sides as JSON: a tuple and a list are the same there.
    now = json.loads(pretty(dict(asked)))
    other = [name for name in now if before.get(name) != now[name] and name != OPTIONS]
    if own := [name for name in other if name in _OF_THE_MACHINE]:
        raise UsageError(
            f"run {folder.run_id!r} was started with another {', '.join(own)}, and results of two are not mixed; leave "
            "--resume out to start a new run"
        )
    if other:
        raise UsageError(
            f"run {folder.run_id!r} was started with other {', '.join(other)}; give no options besides --resume and "
            "--out, or leave --resume out to start a new run"
        )


def options_of(folder: RunFolder, given: Mapping[str, Json]) -> Options:
    """The options that a run was started with; `given` are those that its resumption names.

    Raises:
        UsageError: the folder is no mutation run's, or an option that is given contradicts it.
    """
    kept = _read(folder).get(OPTIONS)
    try:
        options = Options.model_validate(kept)
    except ValidationError:
        raise UsageError(f"run {folder.run_id!r} does not say what it was started with; start a new one") from None
    for option, value in given.items():
        before = options.model_dump(by_alias=True)[option]
        if before != value:
            wanted, here = (_said(option, said) for said in (before, value))
            instead = "leave it out" if wanted.startswith("without") else "give that or leave it out"
            raise UsageError(f"run {folder.run_id!r} was started {wanted}, not {here}; {instead}")
    return options


def _said(option: str, value: Any) -> str:
    """An option as it is typed."""
    if value is None or value is False or value == []:
        return f"without {option}"
    if value is True:
        return f"with {option}"
    values = value if isinstance(value, list) else [value]
    return "with " + " ".join(f"{option} {one_line(each)}" for each in values)


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        before = json.loads(folder.file(FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise UsageError(f"run {folder.run_id!r} is not a run of `decodegate mutate`: it has no whole {FILE}")
    return before
