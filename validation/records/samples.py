"""`samples/<gate>.jsonl`: what each unit measured, one line per unit, for analysis outside of decodegate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from validation.gates.base import Unit
from validation.records.jsonio import canonical, named, unpacked
from validation.records.record import UnitResult
from validation.records.storage import RunFolder


def write_samples(folder: RunFolder, gate: str, units: Sequence[Unit], results: Mapping[str, UnitResult]) -> None:
    """One line per measured unit in the order of the plan: `{"unit", "params", "result"}`."""
    lines = [
        canonical(
            {
                "unit": unit.id,
                "params": named(unit.params),
                "result": named(unpacked(results[unit.id].result)),
            }
        )
        for unit in units
        if unit.id in results
    ]
    folder.write(b"\n".join(lines) + b"\n", "samples", f"{gate}.jsonl")
