"""The sync gate's decisions: what is a finding, which control was missed, what is left open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.gates.base import Finding

SLACK_MS = 1_000
"""Allowed beyond a wait's limit: a loaded host may leave a process unscheduled for so long; a hang lasts for ever."""

Results = Mapping[str, Mapping[str, Any]]


def findings_of(results: Results) -> list[Finding]:
    """Everything that speaks against the candidate, in the order of the units."""
    found: list[Finding] = []
    for unit, result in results.items():
        if "scenarios" in result:
            found += _violations(unit, result["scenarios"])
        elif unit.startswith("stress-"):
            found += [*_failures(unit, result), *_untold(unit, result)]
        elif unit == "sentinels":
            found += _words(unit, result)
        elif unit == "sanitizers":
            found += [Finding(report["kernel"], report["message"], unit) for report in result["reports"]]
    return found


def undecided_of(results: Results) -> list[str]:
    """Scenarios that were not explored to their end."""
    return [
        f"{name}: not exhausted after {entry['states']} states"
        for result in results.values()
        for name, entry in result.get("scenarios", {}).items()
        if not entry["complete"] and entry["violation"] is None
    ]


def missed_controls(results: Results) -> list[str]:
    """Broken variants that were not caught: then what was clean proves nothing."""
    missed = [f"{fault} (explored)" for fault, said in results.get("controls", {}).items() if not said["caught"]]
    for unit, result in results.items():
        if unit.startswith("stress-"):
            missed += [f"{fault} ({unit})" for fault, said in result["controls"].items() if not said["caught"]]
    return missed


def _violations(unit: str, scenarios: Mapping[str, Any]) -> Iterator[Finding]:
    for name, entry in scenarios.items():
        if entry["violation"] is not None:
            broken, events = entry["violation"], len(entry["replay"]["events"])
            message = f"{name}: {broken['message']} ({broken['invariant']}; trace of {events} events)"
            yield Finding(broken["invariant"], message, unit)


def _failures(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    for failure in result["failures"]:
        delays = failure["replay"]["plan"]["delays"]
        message = f"{result['ranks']} processes, seed {failure['seed']}: {failure['how']} ({len(delays)} delays)"
        yield Finding("collectives", message, unit)


def _untold(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """A rank that stalled, died or disagreed must end the step on every living rank, in time and by name."""
    for what, stop in result["stopped"].items():
        for rank, said in enumerate(stop["ranks"]):
            if said is None:
                if not (stop["killed"] and rank == 0):
                    yield Finding("fail-stop", f"{what}: rank {rank} never came to an end", unit)
            elif not said["kind"].startswith("Rank") or "epoch" not in said["error"]:
                yield Finding("fail-stop", f"{what}: rank {rank} says {said['error'] or 'nothing'!r}", unit)
            elif said["waited_ms"] > stop["limit_ms"] + SLACK_MS:
                limit = f"{stop['limit_ms']} ms allowed, {SLACK_MS} ms of slack"
                yield Finding("fail-stop", f"{what}: rank {rank} waited {said['waited_ms']} ms, {limit}", unit)


def _words(unit: str, result: Mapping[str, Any]) -> Sequence[Finding]:
    broken = {name: result[name] for name in ("sentinels", "lost", "changed") if result[name]}
    if not broken:
        return []
    counts = ", ".join(f"{count} {name}" for name, count in broken.items())
    message = f"{counts} of {result['checked']} pairs of values; first {result['example']}"
    return [Finding("no payload is the sentinel", message, unit)]
