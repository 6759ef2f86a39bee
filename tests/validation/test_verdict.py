"""Verdicts fail closed: in every mix of gates, only a run whose required gates all passed is PASS."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import decodegate_toy as toy
import pytest

from validation.gates.base import Context, GateResult, Unit
from validation.records.record import ArmUse, GateDoc
from validation.run.judging import counts_as, fail_closed, plan_error, run_verdict, stopper
from validation.targets.base import ArmConfig
from validation.verdict import Verdict, exit_code, overall

ALL = list(Verdict)


def doc(verdict: Verdict, *, required: bool = True, layer: int = 1, stopped_by: Verdict | None = None) -> GateDoc:
    return GateDoc(
        name="g",
        layer=layer,
        question="q",
        cost="c",
        needs=[],
        required=required,
        verdict=verdict,
        counts_as=counts_as(verdict, required=required, stopped_by=stopped_by),
        summary="s",
    )


def test_a_run_passes_only_when_every_required_gate_passed_and_no_optional_one_failed() -> None:
    for required, optional in product([*product(ALL), *product(ALL, ALL)], [(), *product(ALL)]):
        docs = [doc(verdict) for verdict in required] + [doc(verdict, required=False) for verdict in optional]
        verdict = run_verdict(docs)
        passes = set(required) == {Verdict.PASS} and Verdict.FAIL not in optional
        assert (exit_code(verdict) == 0) == (verdict is Verdict.PASS) == passes, (required, optional)
        assert verdict is overall(required, optional), (required, optional)


def test_a_run_without_required_gates_fails() -> None:
    assert run_verdict([]) is Verdict.FAIL
    assert run_verdict([doc(Verdict.PASS, required=False)]) is Verdict.FAIL


def test_exit_codes() -> None:
    assert {verdict: exit_code(verdict) for verdict in ALL} == {
        Verdict.PASS: 0,
        Verdict.FAIL: 1,
        Verdict.INCONCLUSIVE: 3,
        Verdict.SKIPPED: 1,
        Verdict.ERROR: 4,
    }
    assert [exit_code(verdict, bisect=True) for verdict in ALL] == [0, 1, 125, 1, 125]


def test_what_stops_a_costlier_layer() -> None:
    gate = toy.CostlyGate()
    stops = {
        (verdict, required): stopper([doc(verdict, required=required)], gate, keep_going=False) is not None
        for verdict in ALL
        for required in (True, False)
    }
    assert {key for key, stopped in stops.items() if stopped} == {
        (Verdict.FAIL, True),
        (Verdict.FAIL, False),
        (Verdict.ERROR, True),
    }
    assert stopper([doc(Verdict.FAIL, layer=2)], gate, keep_going=False) is None
    assert stopper([doc(Verdict.FAIL)], gate, keep_going=True) is None


def test_a_gate_stopped_by_an_error_does_not_turn_the_error_into_a_failure() -> None:
    stopped = doc(Verdict.SKIPPED, layer=2, stopped_by=Verdict.ERROR)
    assert run_verdict([doc(Verdict.ERROR), stopped]) is Verdict.ERROR
    assert run_verdict([doc(Verdict.FAIL), doc(Verdict.SKIPPED, layer=2, stopped_by=Verdict.FAIL)]) is Verdict.FAIL


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "planned no units"),
        (["a", "../b"], "'../b', which is not safe"),
        (["a", "A"], "more than one unit with the id 'a'"),
        (["a", "b"], None),
    ],
)
def test_a_plan_that_cannot_be_kept_is_an_error(ids: list[str], reason: str | None) -> None:
    error = plan_error([Unit(name) for name in ids])
    assert (error is None) == (reason is None)
    assert reason is None or reason in str(error)


@pytest.mark.parametrize(
    ("use", "passes"),
    [
        (None, False),
        (ArmUse(), True),
        (ArmUse(steps={"specialized": 3}), True),
        (ArmUse(steps={"specialized": 1, "generic": 2}, fallbacks={"prefill": 2}), True),
        (ArmUse(steps={"generic": 2}, fallbacks={"prefill": 1, "mixed": 1}), False),
    ],
)
def test_a_pass_needs_the_candidate_on_its_own_path(use: ArmUse | None, passes: bool) -> None:
    candidate = ArmConfig("candidate", decode_backend="latency_specialized")
    context = Context(toy.ToyTarget(), ArmConfig("baseline"), candidate, 0, {})
    arms = {} if use is None else {"candidate": use}
    judged = fail_closed(GateResult("g", Verdict.PASS, "fine"), arms, context)
    assert (judged.verdict is Verdict.PASS) == passes
    assert bool(judged.findings) != passes
    unsure = GateResult("g", Verdict.INCONCLUSIVE, "unsure")
    assert fail_closed(unsure, arms, context) == unsure


@pytest.mark.parametrize(("asked", "passes"), [("auto", False), ("latency_specialized", True)])
def test_a_pass_needs_a_baseline_that_did_not_run_the_candidates_path(asked: str, passes: bool) -> None:
    """An engine may choose the specialised path by itself; one that was asked for it is meant to."""
    candidate = ArmConfig("candidate", decode_backend="latency_specialized")
    context = Context(toy.ToyTarget(), ArmConfig("baseline", decode_backend=asked), candidate, 0, {})
    arms = {name: ArmUse(steps={"specialized": 3}) for name in ("baseline", "candidate")}
    judged = fail_closed(GateResult("g", Verdict.PASS, "fine"), arms, context)
    assert (judged.verdict is Verdict.PASS) == passes
    assert passes or "3 steps of the baseline arm ran the candidate's path" in judged.summary
    as_they_are = replace(context, baseline=ArmConfig("baseline"), candidate=ArmConfig("candidate"))
    assert fail_closed(GateResult("g", Verdict.PASS, "fine"), arms, as_they_are).verdict is Verdict.PASS
