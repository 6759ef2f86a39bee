"""The known-worse control is told apart, and a candidate whose state is no better than it is not passed."""

from __future__ import annotations

from typing import Any

import pytest
from small_k3 import context_of

from validation.faults.base import Fault
from validation.gates.base import GateResult
from validation.gates.parity.control import UNIT
from validation.gates.parity.gate import ParityGate
from validation.verdict import Verdict

SETTINGS: dict[str, Any] = {
    "prompt_length": 8,
    "decode_length": 4,
    "min_sequences": 2,
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}],
    "controls": [UNIT],
}


def controlled(*faults: Fault) -> tuple[GateResult, dict[str, Any]]:
    context, gate = context_of(SETTINGS, faults=faults), ParityGate()
    assert gate.settings_error(SETTINGS) is None
    units = gate.plan(context)
    assert [unit.id for unit in units] == [UNIT, "fp8-tp1-b2"]
    measured = {unit.id: gate.measure(unit, context) for unit in units}
    return gate.judge(measured, context), measured[UNIT]


def _rounding(op: Any) -> Any:
    def rounded(**case: Any) -> Any:
        y = op(**case)
        case["state"].copy_(case["state"].bfloat16().float())
        return y

    return rounded


def test_a_state_in_bf16_is_told_apart_on_low_rank_keys_and_the_report_says_by_how_much() -> None:
    result, seen = controlled()
    assert seen["times"] > 100
    assert f"has {seen['times']:.3g} times the error of the candidate's" in result.summary
    assert not [finding for finding in result.findings if finding.unit == UNIT]


def test_a_candidate_that_rounds_its_state_is_not_told_from_the_control_and_fails() -> None:
    fault = Fault(
        "made-up", "x", "kda_step", (), ("specialized",), lambda ops: {"kda_step": _rounding(ops["kda_step"])}
    )
    result, _ = controlled(fault)
    assert result.verdict is Verdict.FAIL
    assert any(finding.unit == UNIT and "known-worse control" in finding.message for finding in result.findings)


@pytest.mark.parametrize("controls", [["other"], "bf16-state-control", [UNIT, UNIT]])
def test_an_unknown_control_is_refused(controls: Any) -> None:
    assert ParityGate().settings_error({**SETTINGS, "controls": controls})
