"""One NaN ends its own request and nothing else: planted into the candidate's engine, beside a fault or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_k3 import context_of
from test_rejection import SETTINGS

from validation.faults.base import ENGINE, Fault
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
    assert result.tables[-1].rows[0][1] == 3


def test_a_model_without_a_drafter_is_asked_about_its_state_alone() -> None:
    result = judged()
    assert result.verdict is Verdict.PASS, result.findings
    assert result.tables[-1].rows[0][1] == 2


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


def test_a_prefix_whose_state_is_nan_is_kept_from_the_next_request(embedded: BuiltinTarget) -> None:
    def unguarded(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def _keep_prefixes(self, request: Any, chunk: Any, committed: int, logits: Any) -> None:
                super()._keep_prefixes(request, chunk, committed, torch.zeros(1))

        return Faulty

    fault = Fault("made-up", "x", "engine", (), (ENGINE,), lambda parts: {"engine": unguarded(parts["engine"])})
    context, gate = context_of(SETTINGS, faults=(fault,), target=embedded), ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == UNIT]
    result = gate.judge({unit.id: gate.measure(unit, context)}, context)
    assert result.verdict is Verdict.FAIL
    assert "fills a prefix block ended request 2" in result.findings[0].message
