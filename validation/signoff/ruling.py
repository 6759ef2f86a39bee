"""What one demand of a policy came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from validation.signoff.policy import Waiver


class Outcome(StrEnum):
    """GO, NO-GO, or that the evidence cannot carry either."""

    GO = "GO"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Ruling:
    """One demand: its outcome, what the evidence says, the waivers that it rests on, and notes."""

    subject: str
    outcome: Outcome
    said: str
    waivers: tuple[Waiver, ...] = ()
    notes: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> Ruling:
        """The ruling with notes added."""
        return replace(self, notes=(*self.notes, *notes))

    def waived_by(self, waivers: tuple[Waiver, ...]) -> Ruling:
        """The ruling turned into GO by waivers."""
        return replace(self, outcome=Outcome.GO, waivers=waivers)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """NO-GO before INCONCLUSIVE before GO; nothing at all is INCONCLUSIVE."""
    found = set(outcomes)
    for outcome in (Outcome.NO_GO, Outcome.INCONCLUSIVE, Outcome.GO):
        if outcome in found:
            return outcome
    return Outcome.INCONCLUSIVE
