"""Schedules that nobody wrote: the parity gate's units of random ones, and of every verify step there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from validation.fuzz.case import Case
from validation.fuzz.corners import corners
from validation.fuzz.files import Subject, document
from validation.fuzz.search import search
from validation.fuzz.trial import Trial, prepare
from validation.fuzz.verify import verify_cases
from validation.gates.base import Context, Finding, Table, Unit
from validation.gates.parity import containment, rejection, sampled_answers, sampler
from validation.targets.optional import Accepting

VERIFY, CORNERS = "verify-counts", "corners"
"""The units of every number of drafts with every number of them accepted, and of the cases by hand."""

EXACT = (rejection.UNIT, sampler.UNIT, containment.UNIT, CORNERS, VERIFY)
"""Units that are asked wherever there is fuzzing, and need no draw of a schedule."""


def fuzz_units(settings: Mapping[str, Any]) -> list[Unit]:
    """The verify steps, then one search for each seed; nothing where the profile does not fuzz."""
    sampled = [Unit(sampled_answers.UNIT, {"fuzz": sampled_answers.UNIT})] if settings.get("sampled_answers") else []
    if not settings.get("fuzz_seeds", 0):
        return sampled
    searches = [Unit(f"fuzz-{number}", {"fuzz": number}) for number in range(settings["fuzz_seeds"])]
    exact = [Unit(name, {"fuzz": name}) for name in EXACT]
    return [*exact, *sampled, *searches]


def fuzz_refusal(context: Context) -> str | None:
    """Why this target cannot be fuzzed, or None."""
    if not context.settings.get("fuzz_seeds", 0) or hasattr(context.target, "miniature"):
        return None
    return f"target {context.target.name!r} has no miniature to fuzz; take `fuzz_seeds` out of the profile"


def measure_fuzz(unit: Unit, context: Context) -> dict[str, Any]:
    """Plain JSON: cases and steps, and the least failing case with what is wrong in it."""
    kind = unit.params["fuzz"]
    if kind == rejection.UNIT:
        return _rejection(context)
    if kind == sampler.UNIT:
        return _sampler(context)
    if kind == containment.UNIT:
        return {"fuzz": kind, **containment.measure_containment(context), **_NONE}
    if kind == sampled_answers.UNIT:
        return _sampled(context)
    trial = prepare(context.target, context.baseline, context.candidate, True, context.seed)
    if kind in (VERIFY, CORNERS):
        return {"fuzz": kind, **_played(trial, context, verify_cases() if kind == VERIFY else corners())}
    found = search(trial, context.seed * 1000 + kind, context.settings["fuzz_steps"])
    failure = found.failure
    return {
        "fuzz": kind,
        "cases": found.cases,
        "steps": found.steps,
        "findings": list(failure.findings) if failure else [],
        **_kept(context, failure.case if failure else None, failure.findings if failure else ()),
    }


def _rejection(context: Context) -> dict[str, Any]:
    arm = context.target.open(context.candidate)
    chains = rejection.measure_rejection(arm, context.seed) if isinstance(arm, Accepting) else []
    found = [finding.message for finding in rejection.rejection_findings(rejection.UNIT, chains)]
    return {
        "fuzz": rejection.UNIT,
        "cases": len(chains),
        "steps": 0,
        "chains": chains,
        "findings": found,
        **_NONE,
    }


def _sampler(context: Context) -> dict[str, Any]:
    arm = context.target.open(context.candidate)
    asked = sampler.measure_sampler(arm, context.seed) if isinstance(arm, Accepting) else []
    found = [finding.message for finding in sampler.sampler_findings(sampler.UNIT, asked)]
    return {"fuzz": sampler.UNIT, "cases": len(asked), "steps": 0, "asked": asked, "findings": found, **_NONE}


def _sampled(context: Context) -> dict[str, Any]:
    seen = sampled_answers.measure_sampled(context, context.settings["sampled_answers"])
    findings = [finding.message for finding in sampled_answers.sampled_findings(sampled_answers.UNIT, seen)]
    return {"fuzz": sampled_answers.UNIT, "cases": seen["sampled"], "steps": 0, "findings": findings, **seen, **_NONE}


_NONE: dict[str, Any] = {"operations": 0, "replay": None}


def _kept(context: Context, case: Case | None, findings: Sequence[str]) -> dict[str, Any]:
    """A failing case as a file of the run's replays, which holds all that playing it again needs."""
    if case is None:
        return _NONE
    candidate = context.candidate
    subject = Subject(decode_backend=candidate.decode_backend, faults=tuple(f.id for f in candidate.faults))
    return {"operations": len(case.operations), "replay": document(subject, case, findings)}


def _played(trial: Trial, context: Context, named: Iterable[tuple[str, Case]]) -> dict[str, Any]:
    start, cases, findings, failing = trial.steps.total(), 0, list[str](), None
    for name, case in named:
        cases += 1
        own = [f"{name}: {message}" for message in trial.findings(case)]
        failing = failing or (case if own else None)
        findings += own
    return {
        "cases": cases,
        "steps": trial.steps.total() - start,
        "findings": findings[:_FINDINGS],
        **_kept(context, failing, findings[:_FINDINGS]),
    }


_COMPONENTS = {rejection.UNIT: "accept", sampled_answers.UNIT: "accept", sampler.UNIT: "sample"}
"""What a unit's findings are about, where it is not the engine."""

_FINDINGS = 10
"""Findings of a unit that are kept; the rest say the same."""


def fuzz_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong: with the rule of acceptance, or in the least failing case."""
    kind = result["fuzz"]
    component = _COMPONENTS.get(kind, "engine")
    where = f"random schedule of {result['operations']} operations: " if isinstance(kind, int) else ""
    for message in result["findings"]:
        yield Finding(component, f"{where}{message}", unit)


def fuzz_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per unit: what was played, and what failed."""
    rows: list[list[str | int | float]] = [
        [unit, result["cases"], result["steps"], len(result["findings"]), result["operations"] or "none"]
        for unit, result in results.items()
    ]
    caption = (
        "Requests under random schedules against their solo runs, on a miniature of the model; allowed is no breach. "
        "A failing unit's case is among the run's replays, for decodegate replay."
    )
    return Table(
        "Random schedules", ["unit", "cases", "engine steps", "breaches", "operations of the least"], rows, caption
    )
