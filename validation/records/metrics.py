"""The figures of a gate as a flat table: `cells.fp8-tp1-b8.typical_ratio.upper` and its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def flat(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every number among a gate's metrics by its path, lists by index; non-finite ones by name come back as numbers.

    Text and truth values are left out.
    """
    return dict(_walk(metrics, ""))


def _walk(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{where}.{index}")
    elif (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NON_FINITE:
        yield where, float(value)
