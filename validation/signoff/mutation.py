"""The mutation score that a sign-off shows: read from `matrix.json` and `request.json` of a `decodegate mutate` run."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from validation.errors import UsageError
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.loading import load_faults
from validation.mutation.request import FILE as REQUEST
from validation.mutation.run import MATRIX
from validation.records.jsonio import require_keys_once
from validation.records.reading import objection, require_run_name

_Model = TypeVar("_Model", bound=BaseModel)


class _Options(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    gates: list[str] = Field(alias="--gate")


class Asked(BaseModel):
    """What the run was asked for: by which code, of which faults, and whether gates were named."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    version: str
    faults: list[str]
    options: _Options


class _Score(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    caught: int = Field(ge=0, le=10**9)
    asked: int = Field(ge=0, le=10**9)


class _Matrix(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    run: str
    created: date = Field(strict=False)
    profile: str
    sound: bool
    score: _Score
    scores: dict[str, _Score]
    counts: dict[str, int]
    environment: dict[str, Any] = {}


class Mutation(_Matrix):
    """What the sign-off needs of a mutation run."""

    asked: Asked

    @property
    def share(self) -> float | None:
        """Faults caught of those that a gate can see; None where nothing was asked."""
        return (
            self.score.caught / self.score.asked
            if 0 <= self.score.caught <= self.score.asked and self.score.asked
            else None
        )

    @property
    def commit(self) -> str:
        """The commit that was measured."""
        return str(self.environment.get("git_commit") or "unknown")

    def says_nothing(self, code: str) -> str:
        """Why the score says nothing about the gates of records that `code` made; empty where it does."""
        if not self.sound:
            return "the gates were not green without a fault"
        if self.asked.version != code:
            return f"it was measured with {self.asked.version}, the records with {code}"
        catalogue = load_faults().keys()
        if left := catalogue - set(self.asked.faults):
            return f"{len(left)} of the catalogue's {len(catalogue)} faults were not asked"
        if self.asked.options.gates:
            return f"only the gates {', '.join(self.asked.options.gates)} were asked"
        return ""

    def __str__(self) -> str:
        share = f" ({self.share:.1%})" if self.share is not None else ""
        return f"{self.score.caught} of {self.score.asked} faults caught{share}"


def read_mutation(folder: Path) -> Mutation:
    """The mutation score of a run folder of `decodegate mutate`.

    Raises:
        UsageError: a file of it is missing or not whole, or it is another run's.
    """
    asked = _read(folder / REQUEST, Asked, "request of a mutation run")
    found = _read(folder / MATRIX, _Matrix, "detection matrix")
    require_run_name(folder, found.run)
    return Mutation(**dict(found), asked=asked)


def _read(path: Path, model: type[_Model], what: str) -> _Model:
    data = read_limited(path, LARGEST_TEXT_FILE, what)
    try:
        found = model.model_validate_json(data)
        require_keys_once(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not a whole {what}: {objection(error)}") from error
    return found
