"""The parity gate passes a clean candidate, names what a fault has spoilt, and refuses settings that cannot be."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from parity_settings import DECODE, PROMPT, settings_of
from small_k3 import context_of, judged, measured, small_target
from torch import Tensor

from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import GateResult
from validation.gates.parity.gate import ParityGate
from validation.records.record import gate_doc
from validation.targets.base import Capability
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict


@cache
def clean() -> tuple[dict[str, dict[str, Any]], GateResult]:
    """A clean measurement of two cells, shared by the tests that look at its figures, and its judgement."""
    context = context_of(settings_of(batches=(1, 2), sequences=8))
    results = measured(ParityGate(), context)
    return results, ParityGate().judge(results, context)


def components(result: GateResult) -> set[str]:
    return {finding.component for finding in result.findings}


def test_a_clean_candidate_passes_on_the_embedded_model() -> None:
    settings = settings_of("bf16", sequences=6, prompt=32, decode=8)
    result = judged(ParityGate(), context_of(settings, target=BuiltinTarget.load(None)))
    assert [finding.message for finding in result.findings] == []
    assert result.verdict is Verdict.PASS
    assert result.metrics["tokens"] == 6 * 8


def test_a_clean_candidate_passes_with_an_fp8_cache_at_either_batch() -> None:
    _, result = clean()
    assert result.verdict is Verdict.PASS
    assert result.metrics["cells"].keys() == {"fp8-tp1-b1", "fp8-tp1-b2"}


@pytest.mark.parametrize(
    ("fault", "ranks", "spoilt"),
    [
        ("kda-state-transposed", 1, {"logits", "state cache"}),
        ("kda-delta-dropped", 1, {"logits", "state cache"}),
        ("mla-fp8-scale-dropped", 1, {"logits"}),
        ("mla-fp8-scale-not-written", 1, {"logits", "latent cache"}),
        ("kda-conv-shifted", 1, {"logits", "state cache"}),
        ("reduce-stale-rank", 2, {"logits"}),
        ("residual-prefix-kept", 1, {"logits"}),
    ],
)
def test_a_fault_turns_the_gate_red_and_what_it_spoilt_is_named(fault: str, ranks: int, spoilt: set[str]) -> None:
    result = judged(ParityGate(), context_of(settings_of(ranks=(ranks,)), faults=(FAULTS[fault],)))
    assert result.verdict is Verdict.FAIL
    assert spoilt <= components(result)
    unit = f"fp8-tp{ranks}-b2"
    assert all(finding.unit == unit and finding.message.startswith(f"{unit}: ") for finding in result.findings)
    assert unit in result.summary


def test_a_candidate_that_never_ran_specialised_fails_whatever_its_logits() -> None:
    result = judged(ParityGate(), context_of(settings_of(sequences=2), backend="auto"))
    assert result.verdict is Verdict.FAIL
    assert [finding.component for finding in result.findings] == ["plan"]
    assert "the candidate ran no specialised step (it is not on); nothing was judged" in result.findings[0].message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail(value: float) -> None:
    def spoil(ops: Any) -> Any:
        project = ops["projection"]

        def faulty(*, weight: Tensor, **rest: Any) -> Tensor:
            y: Tensor = project(weight=weight, **rest)
            if weight.shape[0] == small_target().dims()["vocab_size"]:
                y = y.clone()
                y[0, 7] = value
            return y

        return {"projection": faulty}

    fault = Fault("spoil", "made up", "projection", (), ("specialized",), spoil)
    result = judged(ParityGate(), context_of(settings_of(sequences=2), faults=(fault,)))
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].component == "logits"
    assert f"{DECODE} of {2 * DECODE} rows hold NaN or infinity (candidate)" in result.findings[0].message
    gate_doc(ParityGate(), result, required=True, units=[])


def test_a_cache_that_is_not_finite_fails() -> None:
    def spoil(ops: Any) -> Any:
        step = ops["kda_step"]

        def faulty(*, state: Tensor, slots: Tensor, **rest: Any) -> Tensor:
            y: Tensor = step(state=state, slots=slots, **rest)
            state[slots[slots > 0][-1], 0, 0, 0] = math.inf
            return y.nan_to_num(0.0)

        return {"kda_step": faulty}

    fault = Fault("spoil", "made up", "kda_step", (), ("specialized",), spoil)
    result = judged(ParityGate(), context_of(settings_of(sequences=2), faults=(fault,)))
    assert result.verdict is Verdict.FAIL
    assert "state cache" in components(result)
    assert any("holds NaN or infinity" in finding.message for finding in result.findings)


@pytest.mark.parametrize("unit", ["fp8-tp1-b1", "fp8-tp1-b2"])
def test_sequences_positions_and_margins_add_up_to_the_tokens(unit: str) -> None:
    result = clean()[0][unit]
    assert result["tokens"] == 8 * DECODE
    assert result["paths"] == {"specialized": result["tokens"] // result["batch"], "generic": 8 // result["batch"]}
    assert result["fallbacks"] == {"prefill only": 8 // result["batch"]}
    for arm in ("candidate", "floor"):
        seen = result[arm]
        assert len(seen["kl_by_sequence"]) == len(seen["log_kl_by_sequence"]) == result["sequences"] == 8
        assert len(seen["kl_by_position"]) == DECODE
        assert sum(margin["tokens"] for margin in seen["summary"]["flips"]) == seen["summary"]["judged"] == 8 * DECODE
        assert all(len(values) == 8 for values in seen["caches"].values())
        # Means of means over equal groups: float64 sums in three orders, each of some 100 roundings.
        mean = seen["summary"]["kl"]["mean"]
        for split in (seen["kl_by_sequence"], seen["kl_by_position"]):
            assert sum(split) / len(split) == pytest.approx(mean, rel=100 * 2.0**-53)


def test_tables_and_plots_cover_all_cells_margins_and_positions() -> None:
    results, judgement = clean()
    cells, flips = judgement.tables
    assert [row[0] for row in cells.rows] == list(results)
    assert sum(int(row[1]) for row in flips.rows) == sum(result["tokens"] for result in results.values())
    positions = judgement.plots[0]
    edges = [tuple(map(int, str(label).split("-"))) for label in positions.x]
    assert (edges[0][0], edges[-1][1]) == (PROMPT, PROMPT + DECODE - 1)
    assert all(right[0] == left[1] + 1 for left, right in pairwise(edges))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"decode_length": 1.5}, "decode_length is 1.5"),
        ({"min_sequences": True}, "min_sequences is True"),
        ({"min_sequences": 8, "most_sequences": 8}, "most_sequences is 8, more than min_sequences (8) is needed"),
        ({"cells": []}, "a list of tables with kv_cache_dtype, tensor_parallel, batches is needed"),
        ({"cells": [{}]}, "each table needs exactly"),
        ({"cells": [{"kv_cache_dtype": "int4", "tensor_parallel": [1], "batches": [1]}]}, "must be one of bf16, fp8"),
        ({"cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [0], "batches": [1]}]}, "in tensor_parallel a list"),
        ({"cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [65]}]}, "in batches a list"),
        ({"cells": settings_of()["cells"] * 2}, "cells name fp8-tp1-b2 more than once"),
        ({"temperature": 1}, "unknown setting 'temperature'"),
    ],
)
def test_settings_that_cannot_be_are_explained(change: dict[str, Any], reason: str) -> None:
    assert reason in (ParityGate().settings_error({**settings_of(), **change}) or "")
    assert ParityGate().settings_error(settings_of()) is None
    assert ParityGate.needs == {Capability.TEACHER_FORCED, Capability.FULL_LOGITS}
