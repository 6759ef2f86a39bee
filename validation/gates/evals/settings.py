"""Settings of the evals gate: which evals, how many items and repeats, and the damage that would be tolerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evals.tasks import EvalTask, load_task, task_names
from validation.gates.base import Context
from validation.gates.settings import Rule, at_least_zero, one_of, positive_integer

_FIELDS = {"name", "items", "repeats", "margin"}
_OPTIONAL = {"max_tokens", "drafts"}


def _evals(value: Any) -> str | None:
    """A list of tables, one for each eval."""
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        return "a list of tables with name, items, repeats, margin is needed"
    for entry in value:
        if not isinstance(entry.get("name", ""), str):
            return f"name of an eval must be a text, one is {entry['name']!r}"
        if not _FIELDS <= set(entry) <= _FIELDS | _OPTIONAL:
            may = ", ".join(sorted(_OPTIONAL))
            return f"each table needs name, items, repeats, margin (and may have {may}), one has {', '.join(entry)}"
        for name in ("items", "repeats", "max_tokens"):
            if name in entry and not (type(entry[name]) is int and 1 <= entry[name] <= 1_000_000):
                return f"{name} of {entry['name']} must be an integer from 1 to 1,000,000"
        if "drafts" in entry and (reason := _drafts(entry["drafts"])):
            return f"drafts of {entry['name']}: {reason}"
        margin = entry["margin"]
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < 1:
            return f"margin of {entry['name']} must be between 0 and 1, in score points: 0.02 is two of a hundred"
    names = [entry["name"] for entry in value]
    return None if len(set(names)) == len(names) else "each eval can be there once"


def _folder(value: Any) -> str | None:
    if not isinstance(value, str):
        return "the path of a folder is needed"
    return None if not value or Path(value).is_dir() else "no such folder"


_drafts = at_least_zero(64)

RULES: Mapping[str, Rule] = {
    "origin": one_of("generated", "published"),
    "data_dir": _folder,
    "batch": positive_integer(64),
    "drafts": _drafts,
    "kv_cache_dtype": one_of("bf16", "fp8"),
    "evals": _evals,
}
OPTIONAL = ("data_dir",)


@dataclass(frozen=True)
class Planned:
    """One eval as the profile wants it; `drafts` is the gate's number where the eval has none of its own."""

    task: EvalTask
    repeats: int
    margin: float
    drafts: int


def unknown_names(settings: Mapping[str, Any]) -> str | None:
    """Evals that do not exist; checked once the single settings are known to be well-formed."""
    known = task_names(settings["origin"])
    strange = [entry["name"] for entry in settings["evals"] if entry["name"] not in known]
    return f"no {settings['origin']} eval is called {strange[0]!r} (there are {', '.join(known)})" if strange else None


_loaded = lru_cache(load_task)
"""A gate plans, measures and judges with the same items; loading them costs seconds."""


def planned(context: Context) -> Sequence[Planned]:
    """The evals with their items. Generated items are drawn by the run's seed.

    Raises:
        evals.tasks.DataError: a published set cannot be had.
    """
    settings = context.settings
    folder = Path(settings["data_dir"]) if settings.get("data_dir") else None
    found = []
    for entry in settings["evals"]:
        task = _loaded(entry["name"], settings["origin"], entry["items"], context.seed, folder)
        if "max_tokens" in entry:
            task = task.limited(entry["max_tokens"])
        drafts = entry.get("drafts", settings["drafts"])
        found.append(Planned(task, entry["repeats"], float(entry["margin"]), drafts))
    return found
