"""What the task files of this folder call: rows out of a task's items, and its grades."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from evals.tasks import EvalTask, Origin, load_task

_loaded: dict[str, EvalTask] = {}


def rows(
    name: str,
    repeats: int = 1,
    origin: Origin = "published",
    items: int | None = None,
    data_dir: str | None = None,
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """The split `test`: one row per (item, repeat). The harness passes its whole metadata; the rest is not ours.

    Raises:
        evals.tasks.DataError: the set cannot be had, or is not the pinned one.
    """
    from datasets import Dataset

    task = _loaded[name] = load_task(name, origin, items, seed, Path(data_dir) if data_dir else None)
    listed = [
        {
            "task": name,
            "item": item,
            "repeat": repeat,
            "text": text_of(task.messages(item, repeat)),
            "expected": task.expected(item, repeat),
        }
        for repeat in range(repeats)
        for item in task.item_ids
    ]
    return {"test": Dataset.from_list(listed)}


def text_of(messages: list[dict[str, str]]) -> str:
    """A chat as the one text that the harness asks with: a single message as it is, several with their speakers."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)


def graded(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Mean score of a row's responses, and the share in which an answer was found."""
    responses = [text for result in results for text in ([result] if isinstance(result, str) else result)]
    grades = [_loaded[doc["task"]].grade(doc["item"], doc["repeat"], text) for text in responses]
    return {
        "score": sum(grade.score for grade in grades) / len(grades),
        "parsed": sum(grade.parsed for grade in grades) / len(grades),
    }


aime25 = partial(rows, "aime25")
gpqa_diamond = partial(rows, "gpqa_diamond")
mrcr = partial(rows, "mrcr")
