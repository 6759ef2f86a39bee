"""Replays: cases and probes that failed before, as a profile or the metrics of an earlier run name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numerics.families import FAMILIES, shapes
from validation.gates.numerics.dims import MODEL, SHAPES, WIDTHS
from validation.gates.numerics.probes import PROBES
from validation.gates.numerics.units import MAX_ROWS
from validation.gates.settings import Rule

MOST_ROWS = MAX_ROWS * 8
"""Rows of a replayed case: a sequence may have that many."""


def replays() -> Rule:
    """A list of tables that name single cases, as `failing_cases` in the metrics of an earlier run lists them."""

    def rule(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list of cases is needed"
        return next((reason for case in value if (reason := replay_error(case))), None)

    return rule


def replay_error(case: Any) -> str | None:
    """Why a table does not name a single case or a probe, or None."""
    if isinstance(case, dict) and "probe" in case:
        return _probe_error(case)
    needed = {"op": str, "width": str, "rows": int, "family": str, "seed": int}
    if not isinstance(case, dict) or any(type(case.get(key)) is not kind for key, kind in needed.items()):
        return f"each case needs {', '.join(needed)}"
    if unknown := set(case) - {*needed, "verify_width", "shape"}:
        return f"a case has no {', '.join(sorted(unknown))}"
    if case["op"] not in FAMILIES or case["family"] not in FAMILIES[case["op"]]:
        return f"there is no family {case['family']!r} of op {case['op']!r}"
    if case["width"] not in (MODEL, SHAPES, *WIDTHS):
        return f"there is no width {case['width']!r}"
    return _shape_error(case) or _rows_error(case)


def _shape_error(case: Mapping[str, Any]) -> str | None:
    if ("shape" in case) != (case["width"] == SHAPES):
        return f"width {SHAPES!r}, and no other, needs the shape's turn"
    if "shape" in case and (case["op"] not in shapes.LEVELS or type(case["shape"]) is not int or case["shape"] < 0):
        return f"shape is {case['shape']!r}; a whole number of 0 or more is needed, and an op that takes shapes in turn"
    return None


def _rows_error(case: Mapping[str, Any]) -> str | None:
    if not 1 <= case["rows"] <= MOST_ROWS or ("verify_width" in case) != (case["op"] == "kda_verify"):
        return f"rows must be 1 to {MOST_ROWS}, and kda_verify alone has a verify_width"
    width = case.get("verify_width", 1)
    if type(width) is not int or not 1 <= width * case["rows"] <= MOST_ROWS:
        return f"verify_width is {width!r}, a whole number of 1 or more with at most {MOST_ROWS} rows in all is needed"
    return None


def _probe_error(case: Mapping[str, Any]) -> str | None:
    """A probe's parameters are those of one of its units at either depth, and a seed."""
    if case["probe"] not in PROBES or type(case.get("seed")) is not int:
        return f"there is no probe {case['probe']!r}, or its seed is missing; there are {', '.join(PROBES)}"
    own = {key: value for key, value in case.items() if key != "seed"}
    if own not in PROBES[case["probe"]].known():
        return f"probe {case['probe']!r} has no unit with these parameters: {own!r}"
    return None
