"""A random model of four layers, deep enough to look for a layer in, and the questions that tests ask about it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from small_k3 import SMALL_K3

from decode_impl.checkpoint import save_checkpoint
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.random_weights import random_checkpoint
from validation.bisect.kernels import Search
from validation.bisect.question import Cell, ParityQuestion
from validation.faults.base import Fault, in_layer
from validation.faults.catalogue import FAULTS
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget

FOUR_LAYERS = replace(SMALL_K3, name="four-layers", num_hidden_layers=4, full_attention_layers=(1, 3))
CELL = Cell("fp8-tp1-b16", sequences=16, prompt=1, decode=3)
"""The honest specialised path, whichever of its ops are left out, is clearly within the floor here."""


@cache
def four_layers() -> BuiltinTarget:
    """The model as a target, loaded once per process."""
    folder = Path(mkdtemp())
    try:
        write_four_layers(folder)
        target = BuiltinTarget.load(folder)
        target.tokens("the tokenizer is read at the first use")
        return target
    finally:
        shutil.rmtree(folder)


def write_four_layers(folder: Path) -> Path:
    """Put the model and a tokenizer into `folder`."""
    save_checkpoint(folder, FOUR_LAYERS, random_checkpoint(FOUR_LAYERS, seed=5).tensors)
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", folder)
    return folder


def faulty(*names: str) -> tuple[Fault, ...]:
    """Faults of the catalogue, each in the layer behind its `@`, or in all."""
    parts = [name.partition("@") for name in names]
    return tuple(in_layer(FAULTS[fault], int(layer)) if layer else FAULTS[fault] for fault, _, layer in parts)


def candidate(*names: str) -> ArmConfig:
    """The specialised arm with these faults."""
    return ArmConfig("candidate", decode_backend="latency_specialized", faults=faulty(*names))


@cache
def _question() -> ParityQuestion:
    return ParityQuestion(four_layers(), ArmConfig("baseline"), candidate(), CELL, seed=0)


def question(*names: str) -> ParityQuestion:
    """The one question of these tests, which has decoded its baseline, about a candidate with these faults."""
    asked = _question()
    asked.candidate = candidate(*names)
    return asked


def search(*names: str, most: int = 100) -> Search:
    """A search in a candidate with these faults."""
    return Search(question(*names), most)
