"""The form of a claims file, and the claims that ship."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from validation.documents import Section, load
from validation.errors import UsageError

PUBLISHED = Path(__file__).parent
"""Folder of the claims files that come with decodegate."""

IMPLEMENTATIONS = ("specialised", "generic")


class Conditions(Section):
    """What a figure was measured under. None: the source does not say."""

    gpu: str | None = None
    gpus: int | None = None
    tensor_parallel: int | None = None
    decode_context_parallel: int | None = None
    batch: int | None = None
    speculation: str | None = None
    acceptance: str | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    kv_cache: str | None = None
    recurrent_state: str | None = None
    weights: str | None = None
    workload: str | None = None
    clock: str | None = None

    def over(self, other: Conditions) -> Conditions:
        """These conditions, and the other's where these say nothing."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


class Arm(Section):
    """One implementation's figure."""

    value: float = Field(gt=0)
    conditions: Conditions = Conditions()


class Claim(Section):
    """One published comparison. `ratio` is the source's own."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    source: str
    reads_as: str
    ratio: float | None = Field(default=None, gt=0)
    conditions: Conditions = Conditions()
    specialised: Arm | None = None
    generic: Arm | None = None

    @model_validator(mode="after")
    def _has_a_figure(self) -> Self:
        if self.specialised is None and self.generic is None:
            raise ValueError(f"claim {self.id!r} has neither a specialised nor a generic figure")
        return self


class Figure(Section):
    """One number of a claim with the conditions that hold for it."""

    claim: str
    implementation: str
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    source: str
    value: float
    conditions: Conditions

    @property
    def name(self) -> str:
        """As it is asked for on the command line."""
        return f"{self.claim}.{self.implementation}"


class ClaimsFile(Section):
    """A whole file."""

    scope: str = ""
    sources: dict[str, str]
    claims: list[Claim] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ids = [claim.id for claim in self.claims]
        twice = [name for name in ids if ids.count(name) > 1]
        unknown = [claim.source for claim in self.claims if claim.source not in self.sources]
        if twice or unknown:
            raise ValueError(f"claim {twice[0]!r} is there twice" if twice else f"no source is called {unknown[0]!r}")
        return self


def published(more: Path | None = None) -> list[ClaimsFile]:
    """The claims files that ship, and `more` of the user's own.

    Raises:
        UsageError: a file is malformed, or uses an id that is taken.
    """
    files = [load(path, ClaimsFile, "claims file") for path in sorted(PUBLISHED.glob("*.toml"))]
    if more is not None:
        own = load(more, ClaimsFile, "claims file")
        taken = {claim.id for file in files for claim in file.claims}
        for claim in own.claims:
            if claim.id in taken:
                raise UsageError(f"{more}: the id {claim.id!r} is that of a published claim; choose another")
        files.append(own)
    return files


def figures(files: Sequence[ClaimsFile]) -> list[Figure]:
    """Every number of every claim."""
    return [
        Figure(
            claim=claim.id,
            implementation=implementation,
            metric=claim.metric,
            unit=claim.unit,
            better=claim.better,
            source=file.sources[claim.source],
            value=arm.value,
            conditions=arm.conditions.over(claim.conditions),
        )
        for file in files
        for claim in file.claims
        for implementation in IMPLEMENTATIONS
        if (arm := getattr(claim, implementation)) is not None
    ]


def find(known: Sequence[Figure], name: str) -> Figure:
    """The figure called `C1.specialised`; `C1` alone is its specialised figure, or its only one.

    Raises:
        UsageError: no figure is called so.
    """
    claim, _, implementation = name.partition(".")
    mine = [figure for figure in known if figure.claim == claim]
    fitting = [figure for figure in mine if not implementation or figure.implementation == implementation]
    if fitting:
        return fitting[0]
    others = ", ".join(figure.name for figure in mine or known)
    raise UsageError(f"no figure is called {name!r}; {'figures of this claim' if mine else 'figures'}: {others}")
