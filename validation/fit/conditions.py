"""Conditions of a path: one that does not hold is one reason. All of them are asked, none stops the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What happens where a condition does not hold."""

    REFUSED = "refused at start-up"
    ASSUMED = "assumed, not checked: fails later or computes something else"
    SCOPE = "outside of what the authors say they support"


@dataclass(frozen=True)
class Unmet:
    """A condition that does not hold: what is given, what is needed, and what happens."""

    reason: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.reason} ({self.kind})"


Check = tuple[bool, str]


def unmet(kind: Kind, checks: Iterable[Check]) -> list[Unmet]:
    """Those of `(holds, reason)` that do not hold."""
    return [Unmet(reason, kind) for holds, reason in checks if not holds]
