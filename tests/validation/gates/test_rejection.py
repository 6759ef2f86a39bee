"""What rejection sampling commits is judged exactly, and no acceptance but the real one can be had in a gate."""

from __future__ import annotations

from typing import Any

import pytest
from small_k3 import context_of, small_target

from decode_impl.deployment import Deployment
from validation.errors import UsageError
from validation.faults.catalogue import FAULTS
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.rejection import CHAINS, UNIT, measure_rejection
from validation.gates.parity.sampled_answers import ALPHA, sampled_findings
from validation.profile import profile_from
from validation.targets.base import ArmConfig
from validation.verdict import Verdict

SETTINGS: dict[str, Any] = {
    "prompt_length": 8,
    "decode_length": 4,
    "min_sequences": 2,
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}],
    "fuzz_seeds": 1,
    "fuzz_steps": 10,
}

BIASED = ("accept-other-q", "accept-residual-is-target", "accept-refused-draft-kept")


def chains(*faults: str) -> list[Any]:
    config = ArmConfig("candidate", "latency_specialized", faults=tuple(FAULTS[name] for name in faults))
    return list(measure_rejection(small_target().open(config), seed=0))


def test_the_committed_distribution_is_the_targets_to_the_last_fraction() -> None:
    seen = chains()
    assert [(chain["vocabulary"], chain["drafts"]) for chain in seen] == list(CHAINS)
    assert [chain["variation"] for chain in seen] == [0.0] * len(CHAINS)
    assert all(chain["accepted"] == chain["exact_accepted"] for chain in seen)


@pytest.mark.parametrize("fault", BIASED)
def test_a_biased_rule_fails_the_gate(fault: str) -> None:
    context, gate = context_of(SETTINGS, faults=(FAULTS[fault],)), ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == UNIT]
    result = gate.judge({unit.id: gate.measure(unit, context)}, context)
    assert result.verdict is Verdict.FAIL
    assert {finding.component for finding in result.findings} == {"accept"}
    assert "by enumeration" in result.findings[0].message


def test_a_mismatched_q_is_caught_although_it_raises_acceptance() -> None:
    seen = chains("accept-other-q")
    assert any(chain["accepted"] > chain["exact_accepted"] for chain in seen)
    assert all(chain["variation"] > 0 for chain in seen)


def test_a_wrong_residual_is_caught_although_acceptance_is_right() -> None:
    seen = chains("accept-residual-is-target")
    assert all(chain["accepted"] == chain["exact_accepted"] for chain in seen)
    assert all(chain["variation"] > 0 for chain in seen)


def test_sampled_answers_of_another_distribution_are_named() -> None:
    right = {"sampled": 256, "errors": 0, "verified": 250, "statistic": 40.0, "freedom": 30, "p": 0.1, "accepted": 0.5}
    assert list(sampled_findings("u", right)) == []
    [finding] = sampled_findings("u", {**right, "statistic": 200.0, "p": ALPHA / 10})
    assert finding.component == "accept"
    assert "200 at 30 degrees" in finding.message
    assert list(sampled_findings("u", {**right, "errors": 1}))


@pytest.mark.parametrize("missing", [{"verified": 0}, {"freedom": 0, "p": 1.0}])
def test_sampled_answers_that_show_nothing_are_no_pass(missing: dict[str, float]) -> None:
    seen = {"sampled": 9, "errors": 0, "verified": 9, "statistic": 4.0, "freedom": 7, "p": 0.8, "accepted": 0.5}
    assert list(sampled_findings("u", seen)) == []
    [finding] = sampled_findings("u", {**seen, **missing})
    assert "nothing was judged" in finding.message


@pytest.mark.parametrize("option", ["synthetic_acceptance", "acceptance", "acceptance_length"])
def test_synthetic_acceptance_can_never_enter_a_correctness_gate(option: str) -> None:
    with pytest.raises(UsageError, match=option):
        profile_from(
            {"target": {"kind": "builtin"}, "baseline": {}, "candidate": {option: 6}, "gates": {}, "required": []}, "p"
        )
    with pytest.raises(TypeError, match=option):
        Deployment(**{option: 6})
    with pytest.raises(TypeError, match=option):
        ArmConfig("candidate", **{option: 6})
