"""Checks of a gate's settings table, each giving the reason why a value is wrong, or None."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Rule = Callable[[Any], str | None]


def problems(settings: Mapping[str, Any], rules: Mapping[str, Rule], optional: Collection[str] = ()) -> str | None:
    """Everything wrong with `settings` in one line: unknown, missing and invalid keys."""
    found = [f"unknown setting {key!r} (allowed: {', '.join(rules)})" for key in settings if key not in rules]
    found += [f"setting {key!r} is missing" for key in rules if key not in settings and key not in optional]
    for key, rule in rules.items():
        reason = rule(settings[key]) if key in settings else None
        if reason:
            found.append(f"{key} is {settings[key]!r}, {reason}")
    return "; ".join(found) or None


def integers(least: int, most: int) -> Rule:
    """A non-empty list of different integers from `least` to `most`."""

    def rule(value: Any) -> str | None:
        valid = isinstance(value, list) and value and all(type(x) is int and least <= x <= most for x in value)
        if valid and len(set(value)) == len(value):
            return None
        return f"a list of different integers from {least} to {most} is needed"

    return rule


def verify_steps(most: int) -> Rule:
    """A list of different pairs [requests, width], width from 2 to 8, of `most` rows together at most."""

    def rule(value: Any) -> str | None:
        def is_step(x: Any) -> bool:
            return isinstance(x, list) and len(x) == 2 and all(type(n) is int and n > 0 for n in x) and 2 <= x[1] <= 8

        valid = isinstance(value, list) and all(is_step(x) and x[0] * x[1] <= most for x in value)
        if valid and len(set(map(tuple, value))) == len(value):
            return None
        return f"a list of different pairs [requests, width from 2 to 8] of {most} rows together at most is needed"

    return rule


def positive_integer(most: int = 1_000_000) -> Rule:
    """One integer from 1 to `most`."""
    return lambda value: None if type(value) is int and 1 <= value <= most else f"1 to {most} is needed"


def at_least_zero(most: int = 1_000_000) -> Rule:
    """One integer from 0 to `most`."""
    return lambda value: None if type(value) is int and 0 <= value <= most else f"0 to {most} is needed"


def positive_number() -> Rule:
    """One number above 0."""

    def rule(value: Any) -> str | None:
        return (
            None
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            else "a number > 0 is needed"
        )

    return rule


def one_of(*allowed: str) -> Rule:
    """One of these words."""
    return lambda value: None if value in allowed else f"one of {', '.join(map(repr, allowed))} is needed"


def subset(allowed: Collection[str], least: int = 0) -> Rule:
    """A list of at least `least` different names out of `allowed`."""

    def rule(value: Any) -> str | None:
        names = value if isinstance(value, list) and all(isinstance(x, str) and x in allowed for x in value) else None
        if names is not None and len(set(names)) == len(names) >= least:
            return None
        some = "" if least == 0 else f"at least {least} of "
        return f"a list of different names, {some}{', '.join(sorted(allowed))}, is needed"

    return rule


def cells(kv_cache_dtype: Collection[str], optional: Mapping[str, Rule], **lists: Rule) -> Rule:
    """A non-empty list of tables, each with one `kv_cache_dtype`, a list for every other key, and what it may say."""
    names = ("kv_cache_dtype", *lists)
    more = f" and may have {', '.join(optional)}" if optional else ""

    def rule(value: Any) -> str | None:
        if not isinstance(value, list) or not value or not all(isinstance(cell, dict) for cell in value):
            return f"a list of tables with {', '.join(names)} is needed"
        for cell in value:
            if set(cell) - set(optional) != set(names):
                return f"each table needs exactly {', '.join(names)}{more}, one has {', '.join(cell) or 'none'}"
            if cell["kv_cache_dtype"] not in kv_cache_dtype:
                return f"kv_cache_dtype must be one of {', '.join(kv_cache_dtype)}"
            for name, own_rule in {**lists, **optional}.items():
                if name in cell and (reason := own_rule(cell[name])):
                    return f"in {name} {reason}"
        return None

    return rule
