"""The sampler is asked directly, so that a wrong one shows whatever model it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_k3 import context_of, small_target
from test_rejection import SETTINGS

from validation.faults.catalogue import FAULTS
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.sampler import UNIT, measure_sampler, sampler_findings
from validation.targets.base import ArmConfig
from validation.verdict import Verdict


def asked(*faults: str, seed: int = 0) -> list[dict[str, Any]]:
    config = ArmConfig("candidate", "latency_specialized", faults=tuple(FAULTS[name] for name in faults))
    arm: Any = small_target().open(config)
    return measure_sampler(arm, seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_engines_sampler_draws_what_the_probabilities_say(seed: int) -> None:
    assert list(sampler_findings(UNIT, asked(seed=seed))) == []


@pytest.mark.parametrize(
    ("fault", "of"),
    [
        ("sample-temperature-ignored", "how often each token is drawn"),
        ("sample-constant-seed", "a position's token given the one before it"),
        ("long-nan-sanitised", "is refused"),
    ],
)
def test_a_wrong_sampler_fails_the_gate_and_the_question_is_named(fault: str, of: str) -> None:
    context, gate = context_of(SETTINGS, faults=(FAULTS[fault],)), ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == UNIT]
    result = gate.judge({unit.id: gate.measure(unit, context)}, context)
    assert result.verdict is Verdict.FAIL
    assert {finding.component for finding in result.findings} == {"sample"}
    assert any(of in finding.message for finding in result.findings)


class Seeds:
    """A sampler whose seeds are not told apart."""

    def __init__(self, right: Any) -> None:
        self.right = right

    def sample(self, logits: torch.Tensor, temperature: float, top_p: float, seed: int, position: int) -> int:
        return int(self.right.sample(logits, temperature, top_p, 0, position))


def test_requests_that_draw_the_same_numbers_are_found() -> None:
    right: Any = small_target().open(ArmConfig("candidate", "latency_specialized"))
    wrong: Any = Seeds(right)
    found = [finding.message for finding in sampler_findings(UNIT, measure_sampler(wrong, 0))]
    assert any("a seed's token given the seed before it" in message for message in found)
