"""vLLM's offline engine as a target: true teacher-forced decode, and gates that judge what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import ENVIRONMENT

from validation.gates.base import Context, GateResult
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.measure import windows
from validation.targets.base import ArmConfig
from validation.targets.vllm import VllmTarget
from validation.verdict import Verdict

LENGTH, PROMPT = 40, 24
ARMS = {
    name: ArmConfig(name, decode_backend="auto", max_batch=4, max_context=LENGTH) for name in ("baseline", "candidate")
}
SETTINGS: dict[str, Any] = {
    "prompt_length": PROMPT,
    "decode_length": LENGTH - PROMPT,
    "min_sequences": 8,
    "cells": [{"kv_cache_dtype": "bf16", "tensor_parallel": [1], "batches": [4]}],
}


def target_of(python: str, baseline: Path, candidate: Path) -> VllmTarget:
    """A target whose arms have these checkpoints."""
    engine = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
    options = {"python": python, "engine": engine, "candidate": {"model": str(candidate)}}
    return VllmTarget.configured(baseline, {**options, "start_seconds": 900, "call_seconds": 600})


@pytest.fixture(scope="module")
def target(vllm_python: str, checkpoints: Path) -> Iterator[VllmTarget]:
    """A sound baseline, a damaged candidate."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        made = target_of(vllm_python, checkpoints / "sound", checkpoints / "damaged")
        yield made
        made.engines.close()


def judged(target: VllmTarget) -> GateResult:
    context = Context(target, ARMS["baseline"], ARMS["candidate"], 0, SETTINGS)
    gate = ParityGate()
    return gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)


def test_forced_decode_is_real_decode_of_the_given_tokens(target: VllmTarget, checkpoints: Path) -> None:
    """One step a token, logits of the whole vocabulary, each step one row a sequence; and the same as a prefill's."""
    sequences = windows(target, 3, LENGTH, 0)
    steps = list(target.open(ARMS["baseline"]).forced_decode(sequences, PROMPT))
    assert [step.positions for step in steps] == [(p,) * 3 for p in range(PROMPT, LENGTH)]
    vocab = json.loads((checkpoints / "sound" / "config.json").read_text())["vocab_size"]
    assert {tuple(step.logits.shape) for step in steps} == {(3, vocab)}
    assert all(torch.isfinite(step.logits).all() for step in steps)
    # Decoding one token more by prefill must agree with the decode step but for rounding.
    later = list(target.open(ARMS["baseline"]).forced_decode([s[: LENGTH - 4] for s in sequences], LENGTH - 5))
    apart = (later[0].logits - steps[LENGTH - 5 - PROMPT].logits).abs().max()
    assert apart < 0.05 * steps[0].logits.std()


def test_a_damaged_checkpoint_fails_parity(target: VllmTarget) -> None:
    result = judged(target)
    assert result.verdict is Verdict.FAIL, result.summary
    assert "cannot be read" in result.summary


def test_equal_checkpoints_are_never_told_apart(target: VllmTarget, vllm_python: str, checkpoints: Path) -> None:
    """On a CPU another batch may give the same bits: then the floor is nothing, and the gate says so."""
    same = target_of(vllm_python, checkpoints / "sound", checkpoints / "sound")
    same.engines = target.engines
    result = judged(same)
    assert result.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), result.summary
    assert not result.findings
