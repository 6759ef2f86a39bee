"""What a mutation run was asked for, kept in its folder: a resumed run must be asked for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping

from validation.errors import UsageError
from validation.gates.base import Json
from validation.jsonio import pretty
from validation.storage import RunFolder

FILE = "request.json"


def started_with(folder: RunFolder, asked: Mapping[str, Json], resuming: bool) -> None:
    """Keep what a new run is asked for; compare it where a run is resumed. Nothing else in the folder is touched.

    Raises:
        UsageError: the folder is no mutation run's, or was started with something else.
    """
    if not resuming:
        folder.write(pretty(dict(asked)), FILE)
        return
    try:
        before = json.loads(folder.file(FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise UsageError(f"run {folder.run_id!r} is not a run of `decodegate mutate`: it has no whole {FILE}")
    # Both sides as JSON: a tuple and a list are the same there.
    now = json.loads(pretty(dict(asked)))
    other = [name for name in now if before.get(name) != now[name]]
    if other:
        raise UsageError(
            f"run {folder.run_id!r} was started with other {', '.join(other)}; give the options that it was started "
            "with, or leave --resume out to start a new run"
        )
