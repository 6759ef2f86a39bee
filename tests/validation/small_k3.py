"""A small K3-family checkpoint with random weights for the real target, and the few steps that its tests share."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from small_models import SMALL

from decode_impl.checkpoint import save_checkpoint
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.random_weights import random_checkpoint
from validation.faults.base import Fault
from validation.gates.base import Context, Gate, GateResult
from validation.targets.base import ArmConfig, Target
from validation.targets.builtin import BuiltinTarget

SMALL_K3 = replace(SMALL, name="small-k3", num_hidden_layers=3, full_attention_layers=(0,), experts_per_token=2)
"""Every mechanism once. Attention comes first: the first layer's caches know no noise that a floor could show."""


def write_model(folder: Path) -> Path:
    """Put the small checkpoint and a tokenizer into `folder`."""
    save_checkpoint(folder, SMALL_K3, random_checkpoint(SMALL_K3, seed=5).tensors)
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", folder)
    return folder


@cache
def small_target() -> BuiltinTarget:
    """The small checkpoint as a target, loaded once per process; nothing writes to weights."""
    folder = Path(mkdtemp())
    try:
        target = BuiltinTarget.load(write_model(folder))
        target.tokens("the tokenizer is read at the first use")
        return target
    finally:
        shutil.rmtree(folder)


def context_of(
    settings: Mapping[str, Any],
    *,
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
    backend: str = "latency_specialized",
    target: Target | None = None,
) -> Context:
    """Baseline and candidate of the small target under a gate's settings."""
    candidate = ArmConfig("candidate", decode_backend=backend, faults=faults)
    return Context(target or small_target(), ArmConfig("baseline"), candidate, seed, settings)


def measured(gate: Gate, context: Context) -> dict[str, dict[str, Any]]:
    """Results of all units, by id."""
    assert gate.settings_error(context.settings) is None
    return {unit.id: gate.measure(unit, context) for unit in gate.plan(context)}


def judged(gate: Gate, context: Context) -> GateResult:
    """The gate's judgement of what it measures."""
    return gate.judge(measured(gate, context), context)
