"""What a result depends on: the identity of a unit, and the differences that forbid resuming a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from validation.errors import one_line
from validation.gates.base import Context, Gate, Unit
from validation.records.jsonio import digest, named
from validation.records.record import RunRecord, Stable

_SHOWN = 3


def unit_identity(gate: Gate, unit: Unit, context: Context, stable: Stable) -> str:
    """Digest of everything that the unit's result depends on. A kept result of another identity is measured anew."""
    return digest(
        {
            "decodegate": stable.decodegate,
            "seed": stable.seed,
            "target": stable.target.model_dump(mode="json"),
            "arms": stable.arms,
            "gate": gate.name,
            "settings": named(context.settings),
            "unit": unit.id,
            "params": named(unit.params),
        }
    )


def differences(earlier: RunRecord, now: RunRecord) -> list[str]:
    """What the results depend on and has changed since, as `<what>: was <old>, is <new>`."""
    before, after = earlier.stable, now.stable
    pairs: dict[str, tuple[Any, Any]] = {
        "decodegate version": (before.decodegate, after.decodegate),
        "seed": (before.seed, after.seed),
        "profile": (before.profile.content, after.profile.content),
        "selected gates": (before.selected, after.selected),
        "target kind": (before.target.kind, after.target.kind),
        "target name": (before.target.name, after.target.name),
        "target fingerprint": (before.target.fingerprint, after.target.fingerprint),
        "arms": (before.arms, after.arms),
        "torch": (earlier.environment.torch, now.environment.torch),
        "threads": (earlier.environment.threads, now.environment.threads),
        "git commit": (earlier.environment.git_commit, now.environment.git_commit),
    }
    return [change for what, (old, new) in pairs.items() for change in _changes(what, old, new)]


def _changes(what: str, old: Any, new: Any) -> list[str]:
    if old == new:
        return []
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [f"{what}: was {one_line(old)}, is {one_line(new)}"]
    found = [
        change
        for key in sorted({*old, *new})
        for change in _changes(f"{what} {key}", old.get(key, "absent"), new.get(key, "absent"))
    ]
    return found[:_SHOWN] + ([f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
