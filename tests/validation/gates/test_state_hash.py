"""Full-state hashes: all live bytes in the stated order, equal where steps are the same, and what only they see."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch
from small_k3 import context_of, small_target
from torch import Tensor

from decode_impl.runner import ModelRunner
from validation.faults.catalogue import FAULTS
from validation.gates.base import GateResult
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.schedule_judge import schedule_findings
from validation.gates.parity.schedules import SCENARIOS
from validation.targets.base import ArmConfig
from validation.targets.builtin_caches import state_hash
from validation.targets.schedule import Run, Schedule, Submit
from validation.verdict import Verdict

ONLY_HERE = "spec-commit-differs-on-rerun"
SETTINGS: dict[str, Any] = {
    "prompt_length": 8,
    "decode_length": 4,
    "min_sequences": 2,
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}],
    "schedules": list(SCENARIOS),
    "fuzz_seeds": 1,
    "fuzz_steps": 60,
}


def judged(unit_id: str, *faults: str) -> GateResult:
    context = context_of(SETTINGS, faults=tuple(FAULTS[name] for name in faults))
    gate = ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == unit_id]
    return gate.judge({unit.id: gate.measure(unit, context)}, context)


def test_reruns_companions_and_resumptions_that_repeat_their_steps_have_equal_hashes() -> None:
    result = judged("schedule-state-hash")
    assert [finding.message for finding in result.findings] == []
    equal, compared = str(result.tables[-1].rows[0][3]).split(" of ")
    assert equal == compared
    assert int(compared) > 40


def test_a_rerun_that_differs_in_one_bit_is_seen_by_the_hashes() -> None:
    result = judged("schedule-state-hash", ONLY_HERE)
    assert result.verdict is Verdict.FAIL
    assert any(
        "full-state hashes differ from the same steps elsewhere, first after" in f.message for f in result.findings
    )


@pytest.mark.parametrize(
    "unit", ["schedule-verify-steps", "schedule-verify-caches", "schedule-companions", "verify-counts", "fuzz-0"]
)
def test_and_by_nothing_that_compares_within_noise_or_without_drafts(unit: str) -> None:
    assert judged(unit, ONLY_HERE).verdict is Verdict.PASS


@pytest.mark.parametrize(("fault", "request_name"), [("snapshot-without-conv", "whole"), ("state-not-reset", "long")])
def test_a_resumption_that_restores_less_than_all_is_seen(fault: str, request_name: str) -> None:
    result = judged("schedule-state-hash", fault)
    assert any(f"request {request_name}: " in f.message and "hashes differ" in f.message for f in result.findings)


def runner_of() -> tuple[ModelRunner, int, tuple[int, ...]]:
    """A runner with random bytes everywhere, and a request in it of 20 tokens."""
    arm: Any = small_target().open(
        ArmConfig("candidate", "latency_specialized", kv_cache_dtype="fp8", tensor_parallel=2, max_batch=2)
    )
    runner = arm._runner
    torch.manual_seed(0)
    for pool in pools(runner):
        pool.view(torch.uint8).random_(0, 120)
    return runner, 2, (3, 1)


def pools(runner: ModelRunner) -> list[Tensor]:
    return [*runner.states.conv.values(), *runner.states.state.values(), *runner.latents.layers.values()]


def test_the_hash_is_of_all_live_bytes_in_the_stated_order() -> None:
    runner, slot, pages = runner_of()
    seen = (20).to_bytes(8, "little")
    for place in sorted(runner.states.state):
        for pool in (runner.states.conv[place], runner.states.state[place]):
            seen += pool[slot].contiguous().view(torch.uint8).numpy().tobytes()
    for layer in sorted(runner.latents.layers):
        rows = torch.cat([runner.latents.layers[layer][page] for page in pages])[:20]
        seen += rows.contiguous().view(torch.uint8).numpy().tobytes()
    assert state_hash(runner, slot, pages, 20) == sha256(seen).hexdigest()


def test_every_live_byte_changes_the_hash_and_no_other() -> None:
    runner, slot, pages = runner_of()
    before = state_hash(runner, slot, pages, 20)
    states, latents, page = runner.states, runner.latents, runner.deployment.page_size
    for pool in (*states.conv.values(), *states.state.values()):
        # A rank without heads has no bytes.
        if pool[slot].numel():
            assert changed(pool, slot, -1, runner, slot, pages) != before
            assert changed(pool, slot - 1, -1, runner, slot, pages) == before
    for pool in latents.layers.values():
        last = (20 - 1) % page
        assert changed(pool[pages[1]], last, -1, runner, slot, pages) != before
        assert changed(pool[pages[1]], last + 1, 0, runner, slot, pages) == before
    assert state_hash(runner, slot, pages, 19) != before
    assert state_hash(runner, slot, pages, 20) == before


def changed(pool: Tensor, row: int, byte: int, runner: ModelRunner, slot: int, pages: tuple[int, ...]) -> str:
    """The hash with one byte of a row changed; the byte is put back."""
    stored = pool[row].view(torch.uint8).view(-1)
    stored[byte] += 1
    try:
        return state_hash(runner, slot, pages, 20)
    finally:
        stored[byte] -= 1


def test_a_schedule_that_does_not_ask_has_no_hashes_and_one_that_does_has_one_for_every_step() -> None:
    arm: Any = small_target().open(ArmConfig("candidate", "latency_specialized", kv_cache_dtype="fp8"))
    asked = Schedule((Submit("r", (5, 6, 7, 8), (9, 10, 11)), Run()), hash_states=True)
    assert sorted(arm.generate(asked).traces["r"].state_hashes) == [4, 5, 6]
    assert arm.generate(replace(asked, hash_states=False)).traces["r"].state_hashes == {}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"hashes": 9, "hashes_differing": 0, "hash_differs_at": None}, None),
        ({"hashes": 9, "hashes_differing": 2, "hash_differs_at": 7}, "2 of 9 full-state hashes differ"),
        ({"hashes": 0, "hashes_differing": 0, "hash_differs_at": None}, "no full-state hash was given"),
    ],
)
def test_one_hash_that_differs_or_none_at_all_fails(figures: dict[str, Any], message: str | None) -> None:
    seen = {
        "comparison": 0,
        "request": "r",
        "exact": True,
        "error": "",
        "rows": 3,
        "lost": 0,
        "differing": 0,
        **figures,
    }
    result = {"schedule": "state-hash", "raised": "", "broken": {}, "requests": [seen], "floor": {}}
    found = [finding.message for finding in schedule_findings("schedule-state-hash", result)]
    assert len(found) == (message is not None)
    assert message is None or message in found[0]
