"""JSON as this project writes it: one form for digests, one for people, no bare NaN, every value checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_TAG = "$float"


def canonical(value: Any) -> bytes:
    """The one byte string of a plain JSON value: sorted keys, no spaces, ASCII. Non-finite numbers raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def pretty(value: Any) -> bytes:
    """`value` for people: in its own order, indented, with a final newline. Non-finite numbers raise ValueError."""
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def in_order(value: Any) -> Any:
    """A copy of plain JSON with the keys of every object sorted."""
    return json.loads(canonical(value))


def require_keys_once(data: bytes) -> None:
    """Refuse a JSON text with a key twice in one object: most readers take the last value, some the first.

    Raises:
        ValueError, RecursionError: there is such a key, or it is no JSON text, or one nested too deeply.
    """
    json.loads(data, object_pairs_hook=_require_once)


def _require_once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} is there twice in one object")
        seen.add(key)


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


def number_name(number: float) -> str:
    """The name of a non-finite number: `NaN`, `Infinity` or `-Infinity`."""
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def named(value: Any) -> Any:
    """`value` as plain JSON for readers: non-finite numbers become their names, as strings."""
    return _walk(value, number_name, "")


def packed(value: Any) -> Any:
    """`value` as plain JSON that `unpacked` restores exactly: a non-finite number becomes `{"$float": name}`."""
    return _walk(value, lambda number: {_TAG: number_name(number)}, "")


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict):
        if value.keys() == {_TAG}:
            return float(value[_TAG])
        return {key: unpacked(item) for key, item in value.items()}
    return [unpacked(item) for item in value] if isinstance(value, list) else value


def _walk(value: Any, non_finite: Callable[[float], Any], where: str) -> Any:
    """A copy of `value` in lists and dicts.

    Raises:
        TypeError: something that JSON has no form for (a tensor, a set, a key that is no string), with its place.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else non_finite(value)
    if isinstance(value, list | tuple):
        return [_walk(item, non_finite, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if value.keys() == {_TAG}:
            raise TypeError(f"{where or 'the value'} uses the reserved key {_TAG!r}")
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where or 'the value'} has the key {key!r}; keys must be strings")
        return {key: _walk(item, non_finite, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    raise TypeError(f"{where or 'the value'} is of type {type(value).__name__}; plain JSON is needed")
