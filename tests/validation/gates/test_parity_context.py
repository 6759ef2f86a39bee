"""Parity cells with context parallelism: ranks of the candidate hold shares of contexts, the baseline whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_k3 import context_of, judged, measured, small_target

from validation.bisect.question import Cell
from validation.errors import UsageError
from validation.faults.base import ENGINE
from validation.faults.catalogue import FAULTS
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.measure import Arms, windows
from validation.gates.parity.schedule_judge import schedule_findings
from validation.gates.parity.schedule_measure import measure_schedules
from validation.gates.parity.schedules import SCENARIOS, TEXT_LENGTH, TEXTS
from validation.mutation.plan import units_for
from validation.profile import load_profile
from validation.targets.base import ArmConfig, Capability, TargetError
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict

SHARDED = [fault for fault in FAULTS.values() if fault.layer == "decode context parallelism"]


def settings_of(
    ranks: int = 2,
    drafts: int = 0,
    prompt: int = 21,
    kv: str = "fp8",
    decode: int = 12,
    sequences: int = 4,
    **changed: Any,
) -> dict[str, Any]:
    cell = {"kv_cache_dtype": kv, "tensor_parallel": [ranks], "context_parallel": ranks, "batches": [2], **changed}
    cells = [cell | ({"drafts": drafts} if drafts else {})]
    return {"prompt_length": prompt, "decode_length": decode, "min_sequences": sequences, "cells": cells}


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        (settings_of(2), "fp8-tp2-dcp2-b2"),
        (settings_of(8, kv="bf16", sequences=8), "bf16-tp8-dcp8-b2"),
        (settings_of(8, drafts=3), "fp8-tp8-dcp8-b2-d3"),
        (settings_of(8, prompt=2, decode=5), "fp8-tp8-dcp8-b2"),
    ],
    ids=["two ranks", "eight ranks", "verify steps", "ranks without keys"],
)
def test_a_clean_candidate_passes_and_every_step_is_specialised(settings: dict[str, Any], unit: str) -> None:
    context = context_of(settings)
    results = measured(ParityGate(), context)
    assert list(results) == [unit]
    assert results[unit]["fallbacks"] == {"prefill only": settings["min_sequences"] // 2}
    judgement = ParityGate().judge(results, context)
    assert [finding.message for finding in judgement.findings] == []
    assert judgement.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("dcp-local-causal", settings_of(2, drafts=7)),
        ("dcp-share-rounded-down", settings_of(2)),
        ("dcp-owner-off-by-one", settings_of(2)),
        ("dcp-global-blocks", settings_of(2)),
        ("dcp-empty-rank-stale", settings_of(8, prompt=2, decode=5)),
        ("dcp-empty-rank-row-unwritten", settings_of(8, prompt=2, decode=5)),
        ("dcp-merge-unguarded", settings_of(8, prompt=2, decode=5)),
        ("dcp-lse-natural-on-one-rank", settings_of(2)),
        ("dcp-written-by-next-rank", settings_of(2)),
        ("dcp-gathered-by-rank", settings_of(2)),
    ],
)
def test_a_fault_of_context_parallelism_turns_such_a_cell_red(fault: str, settings: dict[str, Any]) -> None:
    result = judged(ParityGate(), context_of(settings, faults=(FAULTS[fault],)))
    assert result.verdict is Verdict.FAIL
    assert result.findings


@pytest.mark.parametrize("fault", ["dcp-local-causal", "dcp-written-by-next-rank"])
def test_a_cell_whose_ranks_hold_whole_contexts_does_not_see_it(fault: str) -> None:
    settings = settings_of(2, context_parallel=1)
    clean, faulty = (judged(ParityGate(), context_of(settings, faults=faults)) for faults in ((), (FAULTS[fault],)))
    assert faulty.metrics == clean.metrics


def test_the_baseline_and_the_floor_hold_whole_contexts() -> None:
    baseline, candidate, floor = ParityGate().arms(context_of(settings_of(8)))
    assert (candidate.tensor_parallel, candidate.context_parallel) == (8, 8)
    assert [(arm.tensor_parallel, arm.context_parallel) for arm in (baseline, floor)] == [(8, 1), (4, 1)]


@pytest.mark.parametrize("fault", SHARDED, ids=[fault.id for fault in SHARDED])
def test_a_fault_of_this_layer_is_asked_of_cells_with_context_parallelism_alone(fault: Any) -> None:
    context = context_of(load_profile("premerge")[1].gates["parity"])
    units = units_for(ParityGate(), context, fault)
    assert units
    assert all("dcp" in unit.params for unit in units)
    if fault.paths != (ENGINE,):
        assert fault.gate == "numerics"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"context_parallel": 4}, "context_parallel is 4 in a cell with tensor_parallel [2]; allowed are 1, and the"),
        ({"tensor_parallel": [2, 8]}, "context_parallel is 2 in a cell with tensor_parallel [2, 8]; allowed are 1"),
        ({"context_parallel": "2"}, "in context_parallel 1 to 64 is needed"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_in_one_line(changed: dict[str, Any], reason: str) -> None:
    error = ParityGate().settings_error(settings_of(2, **changed)) or ""
    assert reason in error
    assert "\n" not in error


def test_a_target_without_context_parallelism_refuses_such_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    without = BuiltinTarget.capabilities - {Capability.CONTEXT_PARALLEL}
    monkeypatch.setattr(BuiltinTarget, "capabilities", without)
    with pytest.raises(ValueError, match="has no decode context parallelism; take the cells with context_parallel out"):
        ParityGate().arms(context_of(settings_of(2)))


def test_an_arm_whose_contexts_are_dealt_out_to_some_of_its_ranks_is_refused_in_one_line() -> None:
    with pytest.raises(TargetError) as refused:
        small_target().open(ArmConfig("candidate", tensor_parallel=8, context_parallel=2))
    assert str(refused.value) == "arm candidate: context_parallel is 2, allowed are 1, 8"


def test_a_bisection_takes_such_a_cell_by_its_name() -> None:
    cell = Cell("fp8-tp8-dcp8-b4")
    assert cell.unit().params == {"kv": "fp8", "tp": 8, "dcp": 8, "batch": 4}
    with pytest.raises(UsageError, match="context_parallel is 2"):
        Cell("fp8-tp8-dcp2-b4")


@pytest.mark.parametrize(
    "scenario", ["poison", "warm-prefix", "page-pressure", "chunks", "preemption", "verify-caches"]
)
def test_what_an_engine_does_with_pages_it_does_with_pages_of_two_ranks(scenario: str) -> None:
    """Poisoned pools, prefixes, preemption, chunks and drafts: no word of another's, the same bits where promised."""
    context = context_of({})
    shared: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "max_context": 2 * TEXT_LENGTH,
        "max_batch": TEXTS,
        "tensor_parallel": 2,
    }
    configs = (
        replace(context.baseline, **shared),
        replace(context.candidate, **shared, context_parallel=2),
        replace(context.baseline, **shared | {"tensor_parallel": 1}),
    )
    texts = windows(small_target(), TEXTS, TEXT_LENGTH, 0)
    arms = Arms(*(small_target().open(config) for config in configs))
    result = measure_schedules(arms, SCENARIOS[scenario](texts), texts)
    assert result["requests"]
    found = schedule_findings("unit", {"schedule": scenario, **result})
    assert [finding.message for finding in found] == []
