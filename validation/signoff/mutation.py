"""The mutation score that a sign-off shows: read from the `matrix.json` of a `decodegate mutate` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from validation.errors import UsageError
from validation.files import read_limited
from validation.records.reading import LARGEST_RECORD, first_problem


class _Score(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    caught: int = Field(ge=0, le=10**9)
    asked: int = Field(ge=0, le=10**9)


class Mutation(BaseModel):
    """What the sign-off needs of a detection matrix."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    run: str
    created: str
    profile: str
    sound: bool
    score: _Score
    scores: dict[str, _Score]
    counts: dict[str, int]
    environment: dict[str, Any] = {}

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

    def __str__(self) -> str:
        share = f" ({self.share:.1%})" if self.share is not None else ""
        return f"{self.score.caught} of {self.score.asked} faults caught{share}" + (
            "" if self.sound else "; the gates were not green without a fault"
        )


def read_mutation(folder: Path) -> Mutation:
    """The mutation score of a run folder of `decodegate mutate`.

    Raises:
        UsageError: there is no `matrix.json` in it, or it is not a whole one.
    """
    path = folder / "matrix.json"
    data = read_limited(path, LARGEST_RECORD, "detection matrix")
    try:
        return Mutation.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else "nested too deeply"
        raise UsageError(f"{str(path)!r} is not a whole detection matrix: {problem}") from error
