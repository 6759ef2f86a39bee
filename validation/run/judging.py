"""Decisions of the runner, as pure functions: what may run, what a gate's result is worth, what the run concludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from validation.gates.base import Context, Finding, Gate, GateResult, Unit
from validation.names import is_safe_name
from validation.records.record import ArmUse, GateDoc
from validation.targets.base import OWN_PATH, Target, counted
from validation.verdict import Verdict, overall

GENERIC_BACKEND = "auto"
"""The `decode_backend` of an arm that must run no step of the candidate's own path."""


def missing(gate: Gate, target: Target) -> str | None:
    """The capabilities that the gate needs and the target lacks, as a sentence; None when it lacks nothing."""
    lacking = sorted(need.value for need in gate.needs - target.capabilities)
    if not lacking:
        return None
    names = " and ".join(f"'{name}'" for name in lacking)
    return f"target {target.name!r} lacks the capability {names}"


def plan_error(units: Sequence[Unit]) -> str | None:
    """Why a gate with this plan cannot judge; None when it can."""
    if not units:
        return "it planned no units, so nothing would be measured"
    unsafe = [unit.id for unit in units if not is_safe_name(unit.id)]
    if unsafe:
        return f"it planned a unit with the id {unsafe[0]!r}, which is not safe as a file name"
    ids = [unit.id.casefold() for unit in units]
    twice = [unit.id for unit in units if ids.count(unit.id.casefold()) > 1]
    if twice:
        return f"it planned more than one unit with the id {twice[0]!r}"
    return None


def fail_closed(result: GateResult, arms: Mapping[str, ArmUse], context: Context) -> GateResult:
    """`result`, unless it is a PASS that the candidate did not earn: then FAIL, with the reason first.

    A PASS is not earned when no unit opened the candidate's arm, when every step of the candidate fell back, or when
    the baseline ran the candidate's path, too.
    """
    if result.verdict is not Verdict.PASS:
        return result
    arm, reason = _unearned(arms, context)
    if not reason:
        return result
    finding = Finding(component=f"{arm} arm", message=reason)
    return replace(result, verdict=Verdict.FAIL, summary=reason, findings=(finding, *result.findings))


def _unearned(arms: Mapping[str, ArmUse], context: Context) -> tuple[str, str]:
    """The arm that kept the candidate's own path from being judged, and how; no reason where it was judged."""
    name, other = context.candidate.name, context.baseline.name
    if name not in arms:
        return name, f"no unit opened the {name} arm, so nothing was said about it"
    if context.candidate.decode_backend == context.baseline.decode_backend:
        return name, ""
    steps, fallbacks = sum(arms[name].steps.values()), arms[name].fallbacks
    if steps and sum(fallbacks.values()) >= steps:
        return name, f"all {steps} steps of the {name} arm fell back ({counted(fallbacks)}), so its own path never ran"
    shared = arms.get(other, ArmUse()).steps.get(OWN_PATH, 0)
    if shared and context.baseline.decode_backend == GENERIC_BACKEND:
        return other, f"{shared} steps of the {other} arm ran the candidate's path, so nothing was compared"
    return name, ""


def stopper(done: Sequence[GateDoc], gate: Gate, *, keep_going: bool) -> GateDoc | None:
    """The gate of a cheaper layer whose failure stops this one; None when the gate is to run.

    FAIL stops, and so does ERROR of a required gate.
    """
    if keep_going:
        return None
    for doc in done:
        failed = doc.verdict is Verdict.FAIL or (doc.required and doc.verdict is Verdict.ERROR)
        if doc.layer < gate.layer and failed:
            return doc
    return None


def counts_as(verdict: Verdict, *, required: bool, stopped_by: Verdict | None = None) -> Verdict | None:
    """What a gate contributes to the run's verdict; None when it has no say.

    A required gate that was SKIPPED counts as FAIL; one that was stopped counts as what stopped it, which has been
    judged already. An optional gate has a say only by FAIL.
    """
    if stopped_by is not None:
        return stopped_by if required else None
    if not required:
        return Verdict.FAIL if verdict is Verdict.FAIL else None
    return Verdict.FAIL if verdict is Verdict.SKIPPED else verdict


def run_verdict(docs: Sequence[GateDoc]) -> Verdict:
    """The verdict of a run from what its gates count as."""
    required = [doc.counts_as for doc in docs if doc.required and doc.counts_as is not None]
    optional = [doc.counts_as for doc in docs if not doc.required and doc.counts_as is not None]
    return overall(required, optional)
