"""A function that makes engine arguments fit, as `target.options.prepare` names one."""

from __future__ import annotations

from typing import Any


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments, proven to have passed through here by the cache format that they then have."""
    return {**options, "kv_cache_dtype": "prepared"}
