"""The real text that ships with the package: English prose and Python source under free licences (see SOURCES.md)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Document:
    """One file of a split: `kind` is prose or code."""

    name: str
    kind: Literal["prose", "code"]
    text: str


def load(split: Split) -> list[Document]:
    """The documents of a split, by name.

    Raises:
        ValueError: the split is neither train nor heldout.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"text split {split!r} is unknown; allowed are train and heldout")
    folder = files("evals").joinpath("data", "text", split)
    entries = sorted((e for e in folder.iterdir() if e.name.endswith(".txt")), key=lambda e: e.name)
    return [
        Document(
            name=entry.name.removesuffix(".txt"),
            kind="code" if entry.name.endswith(".py.txt") else "prose",
            text=entry.read_text(encoding="utf-8"),
        )
        for entry in entries
    ]
