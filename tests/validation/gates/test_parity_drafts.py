"""Parity cells with drafts: verify steps of every number of right drafts against the sequential decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_k3 import context_of, judged, measured, small_target

from validation.faults.catalogue import FAULTS
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.measure import accepted_in_turn, windows
from validation.mutation.plan import units_for
from validation.targets.base import ArmConfig, Capability
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict

PROMPT, DECODE = 20, 12


def settings_of(drafts: int, batch: int = 2, sequences: int = 4) -> dict[str, Any]:
    cell = {"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [batch], "drafts": drafts}
    return {"prompt_length": PROMPT, "decode_length": DECODE, "min_sequences": sequences, "cells": [cell]}


@pytest.mark.parametrize("drafts", [3, 4, 5, 6, 7])
def test_every_number_of_right_drafts_comes_in_turn(drafts: int) -> None:
    assert sorted(accepted_in_turn(drafts)) == list(range(drafts + 1))
    assert accepted_in_turn(drafts)[:2] == (drafts, 0)


@pytest.mark.parametrize("drafts", [3, 5, 7])
def test_a_clean_candidate_passes_with_drafts_and_every_step_is_specialised(drafts: int) -> None:
    context = context_of(settings_of(drafts))
    results = measured(ParityGate(), context)
    [(unit, result)] = results.items()
    assert unit == f"fp8-tp1-b2-d{drafts}"
    assert result["fallbacks"] == {"prefill only": 2}
    # As many tokens as without drafts, in fewer steps.
    assert result["tokens"] == 4 * DECODE
    assert 0 < result["paths"]["specialized"] < 2 * DECODE
    judgement = ParityGate().judge(results, context)
    assert [finding.message for finding in judgement.findings] == []
    assert judgement.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fault", "drafts"),
    [
        ("verify-state-one-late", 3),
        ("verify-conv-not-rolled", 3),
        ("verify-starts-from-last-draft", 3),
        ("spec-verify-rows-see-all", 7),
        ("verify-width-6", 5),
    ],
)
def test_a_fault_of_verify_steps_turns_a_cell_with_drafts_red(fault: str, drafts: int) -> None:
    result = judged(ParityGate(), context_of(settings_of(drafts), faults=(FAULTS[fault],)))
    assert result.verdict is Verdict.FAIL
    assert all(finding.unit == f"fp8-tp1-b2-d{drafts}" for finding in result.findings)


@pytest.mark.parametrize("fault", ["verify-state-one-late", "verify-conv-not-rolled"])
def test_a_cell_without_drafts_does_not_see_such_a_fault(fault: str) -> None:
    assert judged(ParityGate(), context_of(settings_of(0), faults=(FAULTS[fault],))).verdict is Verdict.PASS


def test_logits_and_caches_are_those_of_the_tokens_that_were_kept() -> None:
    arm: Any = small_target().open(ArmConfig("baseline", max_batch=2, max_context=PROMPT + DECODE))
    sequences = windows(small_target(), 2, PROMPT + DECODE, seed=0)
    plain, verified = arm.forced_decode(sequences, PROMPT), arm.verify_decode(sequences, PROMPT, 3, (3, 0, 2))
    steps = list(zip(plain, verified, strict=True))
    for place, (one, other) in enumerate(steps):
        assert (one.positions, one.sequences, one.logits.shape) == (
            other.positions,
            other.sequences,
            other.logits.shape,
        )
        distances = [float((one.logits - any_.logits).abs().max()) for _, any_ in steps]
        assert min(distances) == distances[place]
    for sequence in range(2):
        exact, other_caches = plain.state(sequence), verified.state(sequence)
        assert exact.keys() == other_caches.keys()
        assert all(exact[name].shape == other_caches[name].shape for name in exact)
        assert torch.isfinite(torch.cat([x.flatten() for x in other_caches.values()])).all()
    plain.close()


def test_a_fault_of_verify_steps_alone_is_asked_of_verify_schedules_and_cells_with_drafts() -> None:
    settings = {**settings_of(3), "schedules": ["aborts", "verify-steps"]}
    settings["cells"] = [*settings["cells"], *settings_of(0)["cells"]]
    names = [u.id for u in units_for(ParityGate(), context_of(settings), FAULTS["verify-state-one-late"])]
    assert names == ["schedule-verify-steps", "fp8-tp1-b2-d3"]
    [cell] = units_for(ParityGate(), context_of(settings), FAULTS["kda-delta-dropped"])
    assert cell.id == "fp8-tp1-b2"


@pytest.mark.parametrize(
    ("drafts", "batch", "reason"),
    [
        (2, 2, "in drafts one of 0, 3, 4, 5, 6, 7 is needed"),
        (True, 2, "in drafts one of 0, 3, 4, 5, 6, 7 is needed"),
        (7, 9, "a batch of 9 with 7 drafts each is 72 rows, a specialised step has 64 at most"),
    ],
)
def test_drafts_that_no_specialised_step_has_are_refused(drafts: int, batch: int, reason: str) -> None:
    assert reason in (ParityGate().settings_error(settings_of(drafts, batch)) or "")
    assert ParityGate().settings_error(settings_of(7, 8)) is None


def test_cells_with_drafts_are_refused_on_a_target_without_them() -> None:
    class Plain(BuiltinTarget):
        capabilities = BuiltinTarget.capabilities - {Capability.DRAFTS}

    target = Plain(small_target()._checkpoint, None)
    target.tokens = small_target().tokens  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has no drafts; take the cells with drafts out of the profile"):
        ParityGate().arms(context_of(settings_of(3), target=target))
