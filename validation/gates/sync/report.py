"""What the sync gate shows: states and bounds, delays by sync point, controls, and traces as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from validation.gates.base import Finding, Plot, Table
from validation.sync.controls import CONTROLS
from validation.sync.evidence import CONFIDENCE, upper_bound
from validation.sync.stress_plan import POINTS

Results = Mapping[str, Mapping[str, Any]]
Row = list[str | int | float]

_MOST_TRACES = 3


def tables(results: Results) -> list[Table]:
    """All tables that these units have something for."""
    made = [_explored(results), _stressed(results), _stopped(results), _controls(results), _sanitized(results)]
    return [*(table for table in made if table.rows), *_traces(results)]


def summary(
    results: Results, findings: Sequence[Finding], missed: Sequence[str], undecided: Sequence[str], skipped: str
) -> str:
    """The evidence in one sentence."""
    entries = [entry for result in results.values() for entry in result.get("scenarios", {}).values()]
    seen = f"{sum(entry['states'] for entry in entries)} states in {len(entries)} scenarios"
    runs = [result for unit, result in results.items() if unit.startswith("stress-")]
    steps, failed = sum(run["steps"] for run in runs), sum(len(run["failures"]) for run in runs)
    if steps:
        bound = upper_bound(failed, steps)
        seen += f"; {failed} failures in {steps} stressed steps, {CONFIDENCE:.0%} bound {bound:.1e} a step"
    caught = [said["caught"] for said in results.get("controls", {}).values()]
    if caught:
        seen += f"; {sum(caught)} of {len(caught)} broken variants caught"
    if findings:
        return f"{findings[0].message}; {len(findings)} findings; {seen}"
    if missed:
        return f"blind to {', '.join(missed)}, so its silence proves nothing; {seen}"
    if undecided:
        return f"{'; '.join(undecided)}; {seen}"
    return f"{seen}; sanitizers SKIPPED: {skipped}" if skipped else seen


def replays_of(results: Results) -> dict[str, Any]:
    """Documents for `decodegate replay`, by name: every violation and every failing delay plan."""
    found = {
        name: entry["replay"]
        for result in results.values()
        for name, entry in result.get("scenarios", {}).items()
        if entry["violation"] is not None
    }
    for unit, result in results.items():
        if unit.startswith("stress-"):
            found |= {f"{unit}-{failure['seed']}": failure["replay"] for failure in result["failures"]}
    return found


def trace_plots(results: Results) -> list[Plot]:
    """Pictures of the first traces: of what was found, or of one control where nothing was."""
    return [_picture(title, replay) for title, replay in _shown(results)]


def _shown(results: Results) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(name, replay) for name, replay in replays_of(results).items() if "events" in replay][:_MOST_TRACES]
    if found:
        return found
    caught = {fault: said for fault, said in results.get("controls", {}).items() if "replay" in said}
    if not caught:
        return []
    fault = max(caught, key=lambda name: len(caught[name]["replay"]["events"]))
    return [(f"control {fault}", caught[fault]["replay"])]


def _explored(results: Results) -> Table:
    rows: list[Row] = []
    for unit, result in results.items():
        entries = result.get("scenarios", {})
        if entries:
            how = f"{sum(e['walks'] for e in entries.values())} random walks" if "walks" in unit else "exhaustive"
            broken = sum(entry["violation"] is not None for entry in entries.values())
            counts = [sum(entry[key] for entry in entries.values()) for key in ("states", "transitions")]
            rows.append([unit, len(entries), how, *counts, broken])
    header = ["what", "scenarios", "how", "states", "transitions", "violations"]
    caption = "States that differ, after partial-order reduction; choices, for random walks."
    return Table("Explored", header, rows, caption)


def _stressed(results: Results) -> Table:
    rows: list[Row] = []
    for unit, result in results.items():
        if unit.startswith("stress-"):
            failed, steps = len(result["failures"]), result["steps"]
            bound = f"{upper_bound(failed, steps):.1e}"
            rows.append([result["ranks"], steps, failed, bound, *(result["delays"][point] for point in POINTS)])
    header = ["processes", "steps", "failures", "95 % bound", *(f"delayed at {point}" for point in POINTS)]
    caption = (
        "Delayed runs, each compared bit for bit with its quiet run and with the right sums. Bound: failure rate a "
        "step, Clopper and Pearson, one-sided. On x86, whose stores stay in order."
    )
    return Table("Stress on shared memory", header, rows, caption)


def _stopped(results: Results) -> Table:
    rows: list[Row] = []
    for unit, result in results.items():
        for what, stop in result.get("stopped", {}).items():
            for rank, said in enumerate(stop["ranks"]):
                told = "killed" if said is None else said["error"]
                rows.append([unit, what, rank, told, "" if said is None else said["waited_ms"]])
    header = ["run", "what", "rank", "said", "waited, ms"]
    caption = "Rank 0 stalls or dies, the last one disagrees."
    return Table("A rank that stalls, dies or disagrees", header, rows, caption)


def _controls(results: Results) -> Table:
    explored = results.get("controls", {})
    stress = {unit: result["controls"] for unit, result in results.items() if unit.startswith("stress-")}
    rows: list[Row] = []
    for control in CONTROLS:
        said = explored.get(control.fault)
        if said is None:
            continue
        real = [
            f"{'caught' if said_there[control.fault]['caught'] else 'MISSED'} by {unit}"
            for unit, said_there in stress.items()
            if control.fault in said_there
        ]
        invariant = said["violation"]["invariant"] if said["caught"] else "MISSED"
        where = ", ".join(real) or "not asked"
        rows.append([control.variant, control.fault, invariant, said["scenario"], said["events"], where])
    header = ["broken variant", "fault", "explorer", "scenario", "events of its trace", "real memory"]
    caption = "Each must be caught in this run. Real memory is asked only for what x86 can show."
    return Table("Negative controls", header, rows, caption)


def _sanitized(results: Results) -> Table:
    result = results.get("sanitizers")
    rows: list[Row] = []
    if result is not None:
        rows = [[tool["tool"], tool["shape"], tool["said"]] for tool in result["tools"]]
        rows = rows or [["all", "", f"SKIPPED: {result['skipped']}"]]
    return Table("Sanitizers", ["tool", "shape", "result"], rows)


def _traces(results: Results) -> list[Table]:
    made = []
    for title, replay in _shown(results):
        rows: list[Row] = [[i, e["agent"], e["text"]] for i, e in enumerate(replay["events"], 1)]
        broken = replay["violation"]
        caption = f"{broken['invariant']}: {broken['message']}"
        made.append(Table(f"Trace: {title}", ["#", "agent", "event"], rows, caption))
    return made


def _picture(title: str, replay: Mapping[str, Any]) -> Plot:
    """Agents down, time across; a store's line begins where it was issued, and its mark is where it landed."""
    events = replay["events"]
    kinds = list(dict.fromkeys(event["what"] for event in events))
    series: dict[str, list[float | None]] = {
        kind: [event["agent"] if event["what"] == kind else None for event in events] for kind in kinds
    }
    series["issued behind"] = [None if event["issued"] is None else event["issued"] for event in events]
    places = list(range(1, len(events) + 1))
    caption = f"{replay['violation']['message']}. Numbers are those of the table."
    return Plot(f"Trace: {title}", "timeline", places, series, "event", "agent", caption)
