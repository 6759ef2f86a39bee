"""Evals as data: items, what is asked of each, and how a response is graded. `load_task` is the way in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from evals.samples import Message
from evals.scorers.grade import Grade
from evals.tasks.catalogue import GENERATED, PUBLISHED
from evals.tasks.kinds import Kind
from evals.tasks.loading import DataError, load_rows
from evals.tasks.schema import AnyItem

Origin = Literal["generated", "published"]

__all__ = ["DataError", "EvalTask", "load_task", "task_names"]


@dataclass(frozen=True)
class EvalTask:
    """One eval. `items` are in order, by id; `source` says where they are from, `digest` what they are."""

    name: str
    kind: Kind = field(repr=False)
    items: Mapping[str, AnyItem] = field(repr=False)
    temperature: float
    top_p: float
    max_tokens: int
    source: str
    digest: str

    @property
    def item_ids(self) -> Sequence[str]:
        """Ids in order."""
        return list(self.items)

    def messages(self, item_id: str, repeat: int) -> list[dict[str, str]]:
        """The chat that asks an item; choices are in the order of (item, repeat)."""
        asked: Sequence[Message] = self.kind.ask(self.items[item_id], repeat)
        return [message.model_dump() for message in asked]

    def grade(self, item_id: str, repeat: int, response: str) -> Grade:
        """The grade of a response."""
        return self.kind.grade(self.items[item_id], repeat, response)

    def expected(self, item_id: str, repeat: int) -> str:
        """The right answer."""
        return self.kind.expected(self.items[item_id], repeat)

    def group(self, item_id: str) -> str:
        """The row of the table by groups that an item counts in; empty where there is none."""
        return self.kind.group(self.items[item_id])

    def limited(self, max_tokens: int) -> EvalTask:
        """The task with another cap."""
        return replace(self, max_tokens=max_tokens)


def task_names(origin: Origin) -> list[str]:
    """Names that `load_task` knows."""
    return list(GENERATED if origin == "generated" else PUBLISHED)


def load_task(
    name: str,
    origin: Origin = "generated",
    items: int | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
) -> EvalTask:
    """An eval with its items: all, or the first `items`. Generated ones are drawn by `seed`, and need a number.

    Raises:
        DataError: an unknown name, a set that cannot be had or is not the pinned one, or fewer items than asked for.
    """
    if name not in task_names(origin):
        raise DataError(f"no {origin} eval is called {name!r}; there are {', '.join(task_names(origin))}")
    if origin == "generated":
        return _generated(name, items or 30, seed)
    entry = PUBLISHED[name]
    rows, digest = load_rows(entry.source, data_dir)
    if items is not None and items > len(rows):
        raise DataError(f"{name} has {len(rows)} items, {items} were asked for")
    source = f"{entry.source.repository}@{(entry.source.revision or 'local')[:12]}"
    return _task(name, entry, rows[:items], source, digest)


def _generated(name: str, items: int, seed: int) -> EvalTask:
    entry = GENERATED[name]
    rows = [{"id": f"{seed}-{i}", **_without_id(entry.make(i, seed).row)} for i in range(items)]
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return _task(name, entry, rows, f"generated, seed {seed}", digest)


def _without_id(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "id"}


def _task(name: str, entry: Any, rows: Sequence[Mapping[str, Any]], source: str, digest: str) -> EvalTask:
    items: dict[str, AnyItem] = {}
    for place, row in enumerate(rows):
        try:
            item = entry.kind.schema.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the row"
            raise DataError(f"{name}: row {place}: {where}: {first['msg']} ({source})") from None
        # Two rows of one id would be one item; ids that are no safe names are digested.
        key = item.id if item.id.replace("-", "").replace("_", "").isalnum() and item.id.isascii() else _digest(item.id)
        if key in items:
            raise DataError(f"{name}: two items have the id {item.id!r} ({source})")
        items[key] = item
    return EvalTask(name, entry.kind, items, entry.temperature, entry.top_p, entry.max_tokens, source, digest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
