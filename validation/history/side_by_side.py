"""Two runs side by side: what they depend on, what their gates said, and the figures that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from validation.history.entry import Entry
from validation.records.jsonio import canonical

Row = tuple[str, str, str]


def context_rows(a: Entry, b: Entry, part: str) -> list[Row]:
    """Rows `what, a, b` of what differs in `series` or `run`."""
    left, right = _flat(a.about[part]), _flat(b.about[part])
    names = dict.fromkeys([*left, *right])
    return [(n, left.get(n, "-"), right.get(n, "-")) for n in names if left.get(n) != right.get(n)]


def gate_rows(a: Entry, b: Entry) -> list[Row]:
    """Rows `gate, a's verdict, b's verdict`, every gate of either."""

    def said(entry: Entry, gate: str) -> str:
        return entry.gates[gate].verdict if gate in entry.gates else "not run"

    return [(gate, said(a, gate), said(b, gate)) for gate in dict.fromkeys([*a.gates, *b.gates])]


def figure_rows(a: Entry, b: Entry) -> list[tuple[str, float, float, float]]:
    """Rows `gate figure, a, b, relative change` of figures that both have and that differ, the largest change first."""
    rows = []
    for name in a.figures.keys() & b.figures.keys():
        left, right = a.figures[name], b.figures[name]
        if left != right and not (math.isnan(left) and math.isnan(right)):
            change = right / left - 1 if left and math.isfinite(left) and math.isfinite(right) else math.inf
            rows.append((" ".join(name), left, right, change))
    return sorted(rows, key=lambda row: (-abs(row[3]), row[0]))


def _flat(value: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= {f"{key}: {name}": said for name, said in _flat(item).items()}
        else:
            found[key] = item if isinstance(item, str) else canonical(item).decode()
    return found
