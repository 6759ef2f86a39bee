"""The files in which one implementation's decode is kept: logits by view, answers, a manifest, written as they come.

A folder holds `run.json`, a `VIEW.safetensors` per view (`decode`, `prefill`) and, from a probe, `layers.safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST, LAYERS = "run.json", "layers"
FIRST, SECOND = "first", "second"
"""The two batch compositions of every view."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its tokens (the stop token included), and the two best tokens and their gap at every step."""

    tokens: list[int]
    best: list[list[int]]
    margin: list[float]


@dataclass
class Outputs:
    """What one implementation decoded.

    `views[view][composition]` are logits f32 [sequences, rows, vocab]: rows of `decode` follow the tokens at positions
    prompt_length .. length-2, rows of `prefill` those at positions 0 .. length-2. `answers[composition]` follow the
    questions' order. `about` says what ran; `failures` what did not, by part.
    """

    about: dict[str, Any] = field(default_factory=dict)
    views: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def narrow(logits: Tensor) -> Tensor:
    """The logits in BF16 where that loses nothing, as with a BF16 head; otherwise as they are."""
    rounded = logits.to(torch.bfloat16)
    return rounded if torch.equal(rounded.float(), logits) else logits


def save_view(folder: Path, view: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one view, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    writing = folder / f".{view}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, writing)
    os.replace(writing, folder / f"{view}.safetensors")


def save(folder: Path, outputs: Outputs, *views: str) -> None:
    """Write the manifest and the named views of what there is so far."""
    for view in views:
        save_view(folder, view, {name: narrow(logits) for name, logits in outputs.views[view].items()})
    folder.mkdir(parents=True, exist_ok=True)
    answers = {name: [asdict(answer) for answer in given] for name, given in outputs.answers.items()}
    fields = {"about": outputs.about, "answers": answers, "failures": outputs.failures}
    writing = folder / f".{MANIFEST}"
    writing.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    os.replace(writing, folder / MANIFEST)


def load(folder: Path) -> Outputs:
    """Read a folder back; a view that was never written is absent.

    Raises:
        ValueError: the folder has no readable manifest.
    """
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        answers = {name: [Answer(**answer) for answer in given] for name, given in fields["answers"].items()}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable {MANIFEST} in it ({error})") from None
    views = {
        file.stem: {name: tensor.float() for name, tensor in load_file(file).items()}
        for file in sorted(folder.glob("*.safetensors"))
        if file.stem != LAYERS
    }
    return Outputs(fields["about"], views, answers, fields["failures"])


def compositions(count: int) -> dict[str, list[list[int]]]:
    """Two ways to batch `count` sequences: all at once, and in groups of different sizes, one of them a single row."""
    sizes, groups, start = (5, 7, 1, 11), [], 0
    while start < count:
        size = sizes[len(groups) % len(sizes)]
        groups.append(list(range(start, min(start + size, count))))
        start += size
    return {FIRST: [list(range(count))], SECOND: groups}
