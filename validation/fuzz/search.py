"""Searching for a case that fails, and the least one that does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, given, seed, settings

from validation.fuzz.case import Case
from validation.fuzz.strategy import cases
from validation.fuzz.trial import Trial

CASES_A_ROUND = 25
"""Cases drawn from one seed, before the next: a case has some 30 steps, and a budget should not be overrun by much."""

SHRINK_STEPS = 3000
"""Engine steps that shrinking may cost; what is smallest then is kept."""


@dataclass(frozen=True)
class Failure:
    """The least failing case, what is wrong in it, and the engine's steps up to the first failing one."""

    case: Case
    findings: tuple[str, ...]
    found_after: int


@dataclass(frozen=True)
class Searched:
    """A search: cases played and engine steps run before anything failed, and the failure if there is one."""

    cases: int
    steps: int
    failure: Failure | None


def search(
    trial: Trial, first_seed: int, steps: int, shrink_steps: int = SHRINK_STEPS, first: Iterable[Case] = ()
) -> Searched:
    """Play the cases of `first`, then cases drawn, until so many engine steps have run or one fails, and shrink that.

    Same arguments, same outcome.
    """
    start, played, number = trial.steps.total(), 0, 0
    for case in first:
        played += 1
        if trial.findings(case):
            return Searched(played, trial.steps.total() - start, _least(trial, case, trial.steps.total() - start))
    while trial.steps.total() - start < steps:
        one = _Round(trial, start + steps, shrink_steps)
        failure = one.run(first_seed * 10_000 + number, start)
        played, number = played + one.played, number + 1
        if failure:
            return Searched(played, failure.found_after, failure)
    return Searched(played, trial.steps.total() - start, None)


def _least(trial: Trial, case: Case, found_after: int) -> Failure:
    """A failing case by hand, without the operations that its failure does not need."""
    case = _Round(trial, 0, 0).without_idle(case)
    return Failure(case, tuple(trial.findings(case)), found_after)


class _Broken(Exception):
    """A case failed."""


class _Round:
    """One run of hypothesis. Verdicts are kept: a case is played once, and shrinking beyond its budget ends."""

    def __init__(self, trial: Trial, stop_at: int, shrink_steps: int) -> None:
        self._trial, self._stop_at, self._shrink_steps = trial, stop_at, shrink_steps
        self._known: dict[Case, tuple[str, ...]] = {}
        self._least: Case | None = None
        self._first_failure = 0
        self.played = 0

    def run(self, number: int, start: int) -> Failure | None:
        """The least failing case of this round, if any fails."""
        drawn = settings(
            max_examples=CASES_A_ROUND,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )

        @seed(number)
        @drawn
        @given(cases())
        def hold(case: Case) -> None:
            if self._findings(case):
                self._least = case
                raise _Broken

        try:
            hold()
        except _Broken:
            assert self._least is not None
            least = self.without_idle(self._least)
            return Failure(least, self._known[least], self._first_failure - start)
        return None

    def without_idle(self, case: Case) -> Case:
        """The case without the operations that its failure does not need: those drawn are four at least."""
        for place in reversed(range(len(case.operations))):
            shorter = replace(case, operations=case.operations[:place] + case.operations[place + 1 :])
            self._known[shorter] = tuple(self._trial.findings(shorter))
            if self._known[shorter]:
                case = shorter
        return case

    def _findings(self, case: Case) -> tuple[str, ...]:
        if case not in self._known:
            now = self._trial.steps.total()
            if now >= (self._first_failure + self._shrink_steps if self._first_failure else self._stop_at):
                return ()
            self._known[case] = tuple(self._trial.findings(case))
            self.played += not self._first_failure
            if self._known[case] and not self._first_failure:
                self._first_failure = self._trial.steps.total()
        return self._known[case]
