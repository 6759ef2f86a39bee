"""One NaN ends its own request and nothing else: planted into the candidate's engine, beside a fault or none."""

from __future__ import annotations

from typing import Any

import pytest
from small_k3 import context_of
from test_rejection import SETTINGS

from validation.faults.catalogue import FAULTS
from validation.gates.parity.containment import UNIT
from validation.gates.parity.gate import ParityGate
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict


def judged(*faults: str, target: Any = None) -> Any:
    context, gate = context_of(SETTINGS, faults=tuple(FAULTS[name] for name in faults), target=target), ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == UNIT]
    return gate.judge({unit.id: gate.measure(unit, context)}, context)


@pytest.fixture(scope="module")
def embedded() -> BuiltinTarget:
    return BuiltinTarget.load(None)


def test_a_nan_ends_the_request_that_has_it_and_no_other(embedded: BuiltinTarget) -> None:
    result = judged(target=embedded)
    assert result.verdict is Verdict.PASS, result.findings
    assert result.tables[-1].rows[0][1] == 2


def test_a_model_without_a_drafter_is_asked_about_its_state_alone() -> None:
    result = judged()
    assert result.verdict is Verdict.PASS, result.findings
    assert result.tables[-1].rows[0][1] == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("long-nan-sanitised", "a request whose state holds NaN ended by 'length' and not in an error"),
        ("draft-id-out-of-range", "NaN in the drafter's input of one request: the engine raised IndexError"),
    ],
)
def test_a_nan_that_is_hidden_or_spreads_is_found(fault: str, said: str, embedded: BuiltinTarget) -> None:
    result = judged(fault, target=embedded)
    assert result.verdict is Verdict.FAIL
    assert said in " | ".join(finding.message for finding in result.findings)
