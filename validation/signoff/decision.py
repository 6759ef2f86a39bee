"""The decision of a sign-off, as a pure function of policy, records, mutation score and day. It fails closed.

A ruling says what one demand of the policy came to. NO-GO outranks INCONCLUSIVE, which outranks GO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from fnmatch import fnmatchcase

from validation.records.metrics import flat
from validation.records.record import GateDoc, RunRecord
from validation.signoff.mutation import Mutation
from validation.signoff.policy import Margin, Policy, Waiver
from validation.signoff.records import record_rulings
from validation.signoff.ruling import Outcome, Ruling, worst
from validation.verdict import Verdict

_OUTCOMES = {
    Verdict.PASS: Outcome.GO,
    Verdict.FAIL: Outcome.NO_GO,
    Verdict.SKIPPED: Outcome.NO_GO,
    Verdict.INCONCLUSIVE: Outcome.INCONCLUSIVE,
    Verdict.ERROR: Outcome.INCONCLUSIVE,
}


class Result(StrEnum):
    """The decision in the words of in-toto's test-result predicate."""

    PASSED = "PASSED"
    WARNED = "WARNED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Decision:
    """Every ruling, the waivers that were used, and those that were not."""

    outcome: Outcome
    rulings: tuple[Ruling, ...]
    unused: tuple[Waiver, ...]
    day: date

    @property
    def waived(self) -> list[Ruling]:
        """Rulings that stand only because someone answers for them."""
        return [ruling for ruling in self.rulings if ruling.waivers]

    @property
    def result(self) -> Result:
        """WARNED is a GO with waivers."""
        if self.outcome is not Outcome.GO:
            return Result.FAILED
        return Result.WARNED if self.waived else Result.PASSED

    @property
    def exit_code(self) -> int:
        """0 GO, 1 NO-GO, 3 inconclusive."""
        return {Outcome.GO: 0, Outcome.NO_GO: 1, Outcome.INCONCLUSIVE: 3}[self.outcome]


def decide(policy: Policy, records: Sequence[RunRecord], mutation: Mutation | None, day: date) -> Decision:
    """Apply the policy."""
    rulings = [*record_rulings(policy, records, day), *_gates(policy, records, day), *_margins(policy, records, day)]
    rulings += _mutation(policy, records, mutation, day)
    used = {waiver for ruling in rulings for waiver in ruling.waivers}
    unused = tuple(waiver for waiver in policy.waivers if waiver not in used)
    return Decision(worst(ruling.outcome for ruling in rulings), tuple(rulings), unused, day)


def _gates(policy: Policy, records: Sequence[RunRecord], day: date) -> Iterator[Ruling]:
    """A ruling per required gate, and one per other gate that kept its run from passing."""
    for gate in dict.fromkeys(policy.required):
        judged = _judged(records, gate)
        if not judged:
            yield _waived(
                Ruling(f"gate {gate}", Outcome.NO_GO, "required, and judged in no record"), gate, [], policy, day
            )
            continue
        yield _gate_ruling(gate, judged, policy, day)
    others = dict.fromkeys(d.name for r in records for d in r.stable.gates if d.name not in policy.required)
    for gate in others:
        spoiled = [doc for doc in _judged(records, gate) if doc.counts_as not in (None, Verdict.PASS)]
        if spoiled:
            yield _gate_ruling(gate, spoiled, policy, day)


def _judged(records: Sequence[RunRecord], gate: str) -> list[GateDoc]:
    """What the records say of a gate; where one judged it, those that skipped it say nothing."""
    docs = [doc for record in records for doc in record.stable.gates if doc.name == gate]
    return [doc for doc in docs if doc.verdict is not Verdict.SKIPPED] or docs


def _gate_ruling(gate: str, docs: Sequence[GateDoc], policy: Policy, day: date) -> Ruling:
    """What all records together say about a gate: the worst of them counts, so that no retry hides a failure."""
    bad = [doc for doc in docs if doc.verdict is not Verdict.PASS]
    said = "; ".join(f"{doc.verdict}: {doc.summary}" for doc in bad or docs)
    ruling = Ruling(f"gate {gate}", worst(_OUTCOMES[doc.verdict] for doc in docs), said)
    # A gate that broke or was not run has no findings, so only a waiver of the whole gate covers it.
    components = [finding.component for doc in bad for finding in doc.findings] if all(d.findings for d in bad) else []
    return _waived(ruling, gate, components, policy, day)


def _margins(policy: Policy, records: Sequence[RunRecord], day: date) -> Iterator[Ruling]:
    for margin in policy.margins:
        figures: dict[str, dict[str, float]] = {}
        for record in records:
            for doc in record.stable.gates:
                if doc.name == margin.gate:
                    fitting = {name: v for name, v in flat(doc.metrics).items() if fnmatchcase(name, margin.metric)}
                    figures.setdefault(record.run.id, {}).update(fitting)
        yield _waived(_margin_ruling(margin, figures), margin.gate, [margin.metric], policy, day)


def _margin_ruling(margin: Margin, figures: Mapping[str, Mapping[str, float]]) -> Ruling:
    """The ruling on what each record of the gate has of a figure. A record without any says nothing of the margin."""
    subject = f"margin {margin.gate} {margin.metric}"
    values = {f"{run} {name}": value for run, own in figures.items() for name, value in own.items()}
    if not values:
        return Ruling(subject, Outcome.INCONCLUSIVE, f"no record has such a figure; {margin.limit()} is asked for")
    beyond = {name: value for name, value in values.items() if not margin.holds(value)}
    if beyond:
        shown = ", ".join(f"{name} is {value:.4g}" for name, value in list(beyond.items())[:3])
        more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
        return Ruling(subject, Outcome.NO_GO, f"{margin.limit()} is asked for; {shown}{more} (n = {len(values)})")
    silent = [run for run, own in figures.items() if not own]
    if silent:
        said = f"{', '.join(silent)}: gate {margin.gate} has no such figure; {margin.limit()} is asked for"
        return Ruling(subject, Outcome.INCONCLUSIVE, said)
    low, high = min(values.values()), max(values.values())
    return Ruling(subject, Outcome.GO, f"{low:.4g} to {high:.4g} (n = {len(values)}); {margin.limit()} is asked for")


def _mutation(policy: Policy, records: Sequence[RunRecord], mutation: Mutation | None, day: date) -> Iterator[Ruling]:
    least = policy.min_mutation_score
    if mutation is None:
        if least is not None:
            said = f"a score of {least:.0%} is asked for and no mutation record was given (--mutation)"
            yield Ruling("mutation score", Outcome.NO_GO, said)
        return
    share, age = mutation.share, (day - mutation.created).days
    nothing = mutation.says_nothing(records[0].stable.decodegate)
    if nothing or share is None:
        why = nothing or "nothing was asked"
        yield Ruling("mutation score", Outcome.INCONCLUSIVE, f"{mutation}: {why}; nothing can be said about the gates")
    elif policy.max_age_days is not None and age > policy.max_age_days:
        yield Ruling("mutation score", Outcome.NO_GO, f"{age} days old; {policy.max_age_days} are allowed")
    elif least is not None and share < least:
        yield Ruling("mutation score", Outcome.NO_GO, f"{mutation}; {least:.0%} is asked for")
    else:
        yield Ruling("mutation score", Outcome.GO, str(mutation))


def _waived(ruling: Ruling, gate: str, components: Sequence[str], policy: Policy, day: date) -> Ruling:
    """The ruling, or GO where valid waivers cover all of it. Without components only one of the whole gate does."""
    if ruling.outcome is Outcome.GO:
        return ruling
    mine = [waiver for waiver in policy.waivers if waiver.gate == gate]
    expired = [waiver for waiver in mine if not waiver.valid(day)]
    ruling = ruling.with_notes(f"expired, so it waives nothing: {waiver}" for waiver in expired)
    used: list[Waiver] = []
    wanted: list[str | None] = [*components] or [None]
    for component in wanted:
        cover = [w for w in mine if w.valid(day) and w.covers(component)]
        if not cover:
            return ruling
        used.append(cover[0])
    return ruling.waived_by(tuple(dict.fromkeys(used)))
