"""Cases that failed in earlier runs are measured first in the next one: how they are found and put into a profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from validation.errors import UsageError
from validation.gates.numerics.replay import replay_error
from validation.names import is_safe_name
from validation.profile import Profile
from validation.records.record import RunRecord
from validation.records.storage import RunFolder

GATE = "numerics"
RUNS, CASES = 10, 20
"""Earlier runs that are looked at, the newest first, and cases that are measured again at most."""


def with_replays(profile: Profile, out: Path) -> Profile:
    """The profile with the numerics cases that failed in the latest runs under `out` as its `replay` setting.

    Runs with faults injected on purpose are left out, and so is a record that cannot be read. A profile that has
    replays of its own, or no numerics gate, stays as it is.
    """
    settings = profile.gates.get(GATE)
    cases = [] if settings is None or "replay" in settings else earlier_failures(out, profile.model.path)
    if settings is None or not cases:
        return profile
    return profile.model_copy(update={"gates": {**profile.gates, GATE: {**settings, "replay": cases}}})


def earlier_failures(out: Path, model: str) -> list[Any]:
    """Failing cases of the latest runs of this model, each once."""
    found: list[Any] = []
    for record in _latest(out):
        judged = record.stable.profile.content.get("model")
        if record.stable.faults or not isinstance(judged, dict) or judged.get("path") != model:
            continue
        for gate in record.stable.gates:
            listed = gate.metrics.get("failing_cases", []) if gate.name == GATE else []
            for case in listed if isinstance(listed, list) else []:
                if replay_error(case) is None and case not in found:
                    found.append(case)
    return found[:CASES]


def _latest(out: Path) -> Iterator[RunRecord]:
    names = sorted((path.name for path in out.iterdir() if path.is_dir()), reverse=True) if out.is_dir() else []
    for name in [name for name in names if is_safe_name(name)][:RUNS]:
        try:
            yield RunFolder.find(out, name).read_record()
        except UsageError:
            continue
