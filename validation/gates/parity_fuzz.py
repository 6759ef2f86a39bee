"""Schedules that nobody wrote: the parity gate's units of random ones, and of every verify step there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from validation.fuzz.case import as_json
from validation.fuzz.search import search
from validation.fuzz.trial import prepare
from validation.fuzz.verify import verify_cases
from validation.gates.base import Context, Finding, Table, Unit
from validation.targets.optional import Miniature

VERIFY = "verify-counts"
"""The unit of every number of drafts with every number of them accepted."""


def fuzz_units(settings: Mapping[str, Any]) -> list[Unit]:
    """The verify steps, then one search for each seed; nothing where the profile does not fuzz."""
    if not settings.get("fuzz_seeds", 0):
        return []
    searches = [Unit(f"fuzz-{number}", {"fuzz": number}) for number in range(settings["fuzz_seeds"])]
    return [Unit(VERIFY, {"fuzz": VERIFY}), *searches]


def fuzz_refusal(context: Context) -> str | None:
    """Why this target cannot be fuzzed, or None."""
    if not context.settings.get("fuzz_seeds", 0) or isinstance(context.target, Miniature):
        return None
    return f"target {context.target.name!r} has no miniature to fuzz; take `fuzz_seeds` out of the profile"


def measure_fuzz(unit: Unit, context: Context) -> dict[str, Any]:
    """Plain JSON: cases and steps, and the least failing case with what is wrong in it."""
    trial = prepare(context.target, context.baseline, context.candidate, True, context.seed)
    if unit.params["fuzz"] == VERIFY:
        return {"fuzz": VERIFY, **_verify_steps(trial)}
    found = search(trial, context.seed * 1000 + unit.params["fuzz"], context.settings["fuzz_steps"])
    failure = found.failure
    return {
        "fuzz": unit.params["fuzz"],
        "cases": found.cases,
        "steps": found.steps,
        "findings": list(failure.findings) if failure else [],
        "operations": len(failure.case.operations) if failure else 0,
        "case": as_json(failure.case) if failure else None,
    }


def _verify_steps(trial: Any) -> dict[str, Any]:
    cases, findings, failing = 0, [], None
    for name, case in verify_cases():
        cases += 1
        own = [f"{name}: {message}" for message in trial.findings(case)]
        failing = failing or (case if own else None)
        findings += own
    return {
        "cases": cases,
        "steps": trial.steps.total(),
        "findings": findings[:_FINDINGS],
        "operations": len(failing.operations) if failing else 0,
        "case": as_json(failing) if failing else None,
    }


_FINDINGS = 10
"""Findings of a unit that are kept; the rest say the same."""


def fuzz_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong in the least failing case."""
    for message in result["findings"]:
        where = "verify steps" if result["fuzz"] == VERIFY else f"random schedule of {result['operations']} operations"
        yield Finding("engine", f"{where}: {message}", unit)


def fuzz_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per unit: what was played, and what failed."""
    rows: list[list[str | int | float]] = [
        [unit, result["cases"], result["steps"], len(result["findings"]), result["operations"] or "none"]
        for unit, result in results.items()
    ]
    caption = (
        "Requests under random schedules against their solo runs, on a miniature of the model; allowed is no breach. "
        "The case of a failing unit is in its metrics, for decodegate replay."
    )
    return Table(
        "Random schedules", ["unit", "cases", "engine steps", "breaches", "operations of the least"], rows, caption
    )
