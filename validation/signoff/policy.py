"""The policy of a sign-off: what must have passed, by how much, and what is waived by whom until when."""

from __future__ import annotations

from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from validation.documents import Section, load

Text = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class Margin(Section):
    """A limit on a gate's own figures, tighter than the gate's rule or beside it. `metric` is a path, `*` any part."""

    gate: Text
    metric: Text
    max: float | None = None
    min: float | None = None

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if self.max is None and self.min is None:
            raise ValueError(f"margin on {self.gate} {self.metric!r} has neither max nor min")
        return self

    def holds(self, value: float) -> bool:
        """Whether a figure is within; NaN is not."""
        return (self.max is None or value <= self.max) and (self.min is None or value >= self.min)

    def limit(self) -> str:
        """The limit in words."""
        parts = [
            f"at least {self.min:g}" if self.min is not None else "",
            f"at most {self.max:g}" if self.max is not None else "",
        ]
        return " and ".join(filter(None, parts))


class Waiver(Section):
    """A gate's objection that an owner answers for until a day. It covers the day `expires` itself.

    With `component` it covers only findings of components (or margins on metrics) that fit, `*` being any text.
    """

    gate: Text
    owner: Text
    reason: Text
    expires: date
    component: Text | None = None

    def valid(self, today: date) -> bool:
        """Whether it has not expired."""
        return today <= self.expires

    def covers(self, component: str | None) -> bool:
        """Whether a finding of this component falls under it; None stands for the gate as a whole."""
        return self.component is None or (component is not None and fnmatchcase(component, self.component))

    def __str__(self) -> str:
        what = self.gate + (f", {self.component}" if self.component else "")
        return f"waiver of {what} by {self.owner} until {self.expires}: {self.reason}"


class Policy(Section):
    """A whole policy.

    `profiles` must each have been run in full. `max_age_days` limits the age of every record. `min_mutation_score` asks
    for a mutation record and is its least share of faults caught. `allow_uncommitted` takes records of a source tree
    with uncommitted changes; `own_profiles` takes profiles that differ from the shipped ones of the same name.
    """

    name: Text
    required: list[Text] = Field(min_length=1)
    profiles: list[Text] = Field(default=[])
    max_age_days: int | None = Field(default=None, ge=0)
    min_mutation_score: float | None = Field(default=None, ge=0, le=1)
    allow_uncommitted: bool = False
    own_profiles: bool = False
    margins: list[Margin] = Field(default=[])
    waivers: list[Waiver] = Field(default=[])


def load_policy(path: Path) -> Policy:
    """The policy in a TOML or YAML file.

    Raises:
        UsageError: the file cannot be read, or says something that a policy cannot.
    """
    return load(path, Policy, "policy")
