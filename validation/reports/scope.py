"""What a run compared and how much of it took which path, read from its record. Nothing here decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from pydantic import JsonValue

from validation.records.record import RunRecord
from validation.reports import wording

EMULATION = "emulation"
"""The name by which a target's fingerprint says that the kernels themselves did not run."""

GENERIC = "generic"
"""The baseline's path, as counters name it."""

AS_ABOVE = "as above"
"""What a gate takes from the arms."""

_CANDIDATE = "candidate"

_VARIED = {
    "kv cache dtype": ("kv_cache_dtype",),
    "tensor parallel, or ranks": ("tensor_parallel", "_ranks"),
    "context parallel (candidate alone)": ("context_parallel",),
    "drafts": ("drafts", "_drafts"),
}
"""What gates vary beyond the arms' configuration: the arms' setting first, then how gates end the names of others."""

Settings = Mapping[str, JsonValue]


def implementation(record: RunRecord) -> str:
    """What ran as the specialised path, and on which device."""
    path = _told(record, "specialised path")
    device = _told(record, "device")
    where = f" on {device}" if device else ""
    if not path:
        return f"the target does not say what its specialised path runs{where}"
    if path == EMULATION:
        return f"specialised path: its emulation{where}, not the kernels"
    return f"specialised path: {path}{where}"


def _told(record: RunRecord, name: str) -> str:
    """A part of the fingerprint, of the target or of its candidate alone."""
    fingerprint = record.stable.target.fingerprint
    return fingerprint.get(name) or fingerprint.get(f"{_CANDIDATE} {name}", "")


def pairs(record: RunRecord) -> dict[str, int]:
    """Pairs of answers that were scored, by eval."""
    found: dict[str, int] = {}
    for gate in record.stable.gates:
        for name, figures in gate.metrics.items():
            count = figures.get("pairs") if isinstance(figures, dict) else None
            if isinstance(count, int):
                found[name] = count
    return found


def evals(record: RunRecord) -> str:
    """`pairs` as a phrase; empty where no eval was scored."""
    counted = ", ".join(f"{name} {count:,}" for name, count in pairs(record).items())
    return f"pairs of answers: {counted}" if counted else ""


def steps(record: RunRecord) -> str:
    """The share of the candidate's steps that ran generic; empty where it ran none."""
    used = record.stable.counters.get(_CANDIDATE)
    total = sum(used.steps.values()) if used else 0
    if used is None or total <= 0:
        return ""
    generic = used.steps.get(GENERIC, 0)
    return f"{generic:,} of the candidate's {total:,} steps ({generic / total:.1%}) ran generic"


def fallbacks(record: RunRecord) -> str:
    """The reasons of the candidate's generic steps with their counts, most frequent first; empty where none is."""
    used = record.stable.counters.get(_CANDIDATE)
    counted = sorted(used.fallbacks.items(), key=lambda item: (-item[1], item[0])) if used else []
    return ", ".join(f"{reason} ({count:,})" for reason, count in counted)


def ran(record: RunRecord) -> str:
    """`steps`, and `fallbacks` where there are any; empty where the candidate ran no step."""
    shown = steps(record)
    return ": ".join(filter(None, (shown, fallbacks(record)))) if shown else ""


def at_a_glance(record: RunRecord) -> list[str]:
    """What stands beside the verdict: implementation, answers, and the share of steps that ran generic."""
    return [said for said in (implementation(record), evals(record), steps(record)) if said]


def varied(record: RunRecord) -> tuple[list[str], list[list[str]]]:
    """Header and a row per gate whose settings name other values than the arms' own, from the profile."""
    gates = record.stable.profile.content.get("gates")
    arm = record.stable.arms.get(_CANDIDATE, {})
    rows = []
    for gate in record.stable.gates:
        settings = gates.get(gate.name) if isinstance(gates, dict) else None
        if not isinstance(settings, dict):
            continue
        cells = [_listed(settings, names, arm) for names in _VARIED.values()]
        if any(cell != AS_ABOVE for cell in cells):
            rows.append([gate.name, *cells])
    return ["gate", *_VARIED], rows


def _listed(settings: Settings, names: tuple[str, ...], arm: Settings) -> str:
    """Every value that the settings give one thing, in order. A cell or an eval that names none takes the gate's."""
    tables = _tables(settings)
    if not any(_named(table, names) for table in (settings, *tables)):
        return AS_ABOVE
    own = _named(settings, names) or _flat([arm.get(names[0], "")])
    found = {value for table in tables for value in _named(table, names) or own} or set(own)
    return ", ".join(sorted(found, key=lambda value: (len(value), value)))


def _named(settings: Settings, names: tuple[str, ...]) -> list[str]:
    first, *ends = names
    return _flat([value for key, value in settings.items() if key == first or key.endswith(tuple(ends))])


def _tables(settings: Settings) -> list[Settings]:
    lists = [value for value in settings.values() if isinstance(value, list)]
    return [entry for entries in lists for entry in entries if isinstance(entry, dict)]


def _flat(values: Sequence[JsonValue]) -> list[str]:
    return [str(one) for value in values for one in (value if isinstance(value, list) else [value])]


def clock(record: RunRecord) -> float | None:
    """Seconds from the start of the run to its end, pauses included; None where the record does not tell them."""
    try:
        began, ended = (datetime.fromisoformat(time) for time in (record.run.created, record.run.finished or ""))
        seconds = (ended - began).total_seconds()
    except (TypeError, ValueError):
        return None
    return seconds if seconds >= 0 else None


def work(record: RunRecord) -> str:
    """What the column of a gate's work says, and how long the run took."""
    by_clock = clock(record)
    took = f"; by the clock the run took {wording.duration(by_clock)}" if by_clock is not None else ""
    return f"Work: the time of a gate's units, added up over all workers{took}."
