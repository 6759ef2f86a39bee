"""Schedules: a request in company sees what it sees elsewhere, contracts are kept, and broken engines are found."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_k3 import context_of, small_target

from validation.faults.base import ENGINE, Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import GateResult
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.schedule_judge import (
    CACHE_RESOLUTION,
    SCHEDULE_MULTIPLE,
    SINGLE_MULTIPLE,
    schedule_findings,
)
from validation.gates.parity.schedules import SCENARIOS, TEXT_LENGTH
from validation.targets.base import ArmConfig
from validation.targets.schedule import NO_DRAFTS, Abort, Preempt, Run, Schedule, Submit
from validation.verdict import Verdict

SETTINGS: dict[str, Any] = {
    "prompt_length": 8,
    "decode_length": 4,
    "min_sequences": 2,
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}],
    "schedules": list(SCENARIOS),
}

SEEN_IN = {
    "state-not-reset": "slot-reuse",
    "conv-not-reset": "slot-reuse",
    "null-slot-poisoned": "slot-reuse",
    "page-given-twice": "slot-reuse",
    "slot-given-twice": "one-token-prompts",
    "batch-one-token-prefill-stale": "one-token-prompts",
    "snapshot-not-copied": "page-pressure",
    "pages-not-shared": "page-pressure",
    "prefix-key-by-length": "warm-prefix",
    "batch-chunk-forgets-start": "chunks",
    "batch-padding-clamped-to-slot-1": "batch-bins",
    "batch-rows-swapped-in-mixed-step": "batch-bins",
    "engine-resume-without-recompute": "preemption",
    "spec-column-zero": "verify-steps",
    "spec-one-token-too-many": "verify-steps",
    "spec-prefix-of-last-column": "verify-caches",
}
"""Faults of engines and the schedule that shows them on a small model of random weights."""


def played(name: str, *faults: Fault) -> GateResult:
    """The parity gate's judgement of one schedule."""
    context = context_of(SETTINGS, faults=faults)
    gate = ParityGate()
    [unit] = [unit for unit in gate.plan(context) if unit.id == f"schedule-{name}"]
    return gate.judge({unit.id: gate.measure(unit, context)}, context)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_healthy_engine_keeps_every_schedule(name: str) -> None:
    result = played(name)
    assert [finding.message for finding in result.findings] == []
    assert result.verdict is Verdict.PASS
    assert result.tables[-1].rows[0][0] == name


@pytest.mark.parametrize(("fault", "name"), SEEN_IN.items(), ids=list(SEEN_IN))
def test_a_broken_engine_fails_the_schedule_that_shows_it(fault: str, name: str) -> None:
    result = played(name, FAULTS[fault])
    assert result.verdict is Verdict.FAIL
    assert all(finding.unit == f"schedule-{name}" for finding in result.findings)


def test_an_engine_that_raises_is_found_and_named() -> None:
    def refuse(right: Any) -> Any:
        class Broken(right):  # type: ignore[misc]
            def allocate(self) -> int:
                raise IndexError("no such slot")

        return Broken

    broken = Fault("made-up", "x", "state_cache", (), (ENGINE,), lambda p: {"state_cache": refuse(p["state_cache"])})
    result = played("slot-reuse", broken)
    assert result.verdict is Verdict.FAIL
    assert "the candidate's engine raised IndexError: no such slot" in result.findings[0].message


def arm(**options: Any) -> Any:
    return small_target().open(ArmConfig("candidate", "latency_specialized", kv_cache_dtype="fp8", **options))


def test_a_request_gets_its_given_tokens_and_a_row_of_logits_for_each() -> None:
    prompt, continuation = tuple(range(5, 17)), tuple(range(30, 36))
    trace = arm().generate(Schedule((Submit("r", prompt, continuation), Run()))).traces["r"]
    assert trace.logits.shape[0] == 6
    assert trace.error == ""
    [rows] = {cache.shape[0] for name, cache in trace.after_prompt.items() if name.endswith(".latent")}
    assert rows == 12
    assert {c.shape[0] for name, c in trace.at_end.items() if name.endswith(".latent")} == {12 + 5}


def test_scripted_drafts_are_verified_and_do_not_change_what_is_decoded() -> None:
    submit = Submit("r", tuple(range(5, 17)), tuple(range(30, 48)), (3, 0, NO_DRAFTS, 1))
    with_drafts, without = arm(), arm()
    speculative = with_drafts.generate(Schedule((submit, Run()), drafts=3)).traces["r"]
    plain = without.generate(Schedule((submit, Run()))).traces["r"]
    assert speculative.logits.shape == plain.logits.shape
    # Random weights have near-tied experts, of which a token may take another one; a wrong state would spoil every row.
    close = torch.isclose(speculative.logits, plain.logits, rtol=0.0, atol=0.1).all(-1)
    assert int(close.sum()) > len(close) // 2
    assert sum(with_drafts.counters().steps.values()) < sum(without.counters().steps.values())


def test_preempted_and_aborted_requests_are_traced_as_far_as_they_came() -> None:
    own, gone = Submit("own", (1, 2, 3, 4), (5, 6, 7, 8)), Submit("gone", (9, 8, 7), (6, 5, 4))
    events = (own, gone, Run(3), Preempt("own"), Abort("gone"), Run())
    traces = arm().generate(Schedule(events)).traces
    assert traces["own"].logits.shape[0] == 4
    assert 0 < traces["gone"].logits.shape[0] < 3
    assert not traces["gone"].at_end


def test_poison_reaches_every_slot_and_page_and_no_null_row() -> None:
    broken = arm().generate(Schedule((Submit("r", (1, 2, 3), (4, 5)), Run()), poisoned=True)).broken
    assert {"null rows zero", "unowned rows unchanged"} <= set(broken)
    assert not any(broken.values())


def request_of(**changes: Any) -> dict[str, Any]:
    same = {"comparison": 0, "request": "r", "exact": True, "error": "", "rows": 3, "lost": 0, "differing": 0}
    return {**same, **changes}


def noisy(rms: float, cache: float) -> dict[str, Any]:
    return request_of(exact=False, logit_rms=[0.0, rms], caches={"at_end": {"state": cache}})


FLOOR = {"logit_rms": [0.1, 0.2], "caches": {"state": [0.005, 0.01, 0.02]}}
SINGLE, TYPICAL = 0.02 * SINGLE_MULTIPLE + CACHE_RESOLUTION, 0.01 * SCHEDULE_MULTIPLE + CACHE_RESOLUTION


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (request_of(), None),
        (request_of(differing=1), "1 elements differ in bits"),
        (request_of(lost=2), "2 of 3 tokens have no counterpart"),
        (request_of(rows=0), "0 of 0 tokens have no counterpart"),
        (request_of(error="NaN"), "ended in an error: NaN"),
        (noisy(0.2 * SINGLE_MULTIPLE, TYPICAL), None),
        (noisy(math.nextafter(0.2 * SINGLE_MULTIPLE, 9), 0.0), "logits of token 1 differ by 2.4 (RMS), allowed 2.4"),
        (noisy(math.inf, 0.0), "logits of token 1 differ by inf"),
        (noisy(math.nan, 0.0), "differ by inf"),
        (noisy(0.0, math.nextafter(TYPICAL, 1)), "state caches at end differ by 0.022 (relative RMS, median)"),
    ],
)
def test_what_one_request_may_differ_by(seen: dict[str, Any], message: str | None) -> None:
    found = found_in(seen)
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def found_in(*seen: dict[str, Any]) -> list[str]:
    result = {"schedule": "s", "raised": "", "broken": {}, "requests": list(seen), "floor": FLOOR}
    return [finding.message for finding in schedule_findings("schedule-s", result)]


@pytest.mark.parametrize("value", [math.nextafter(SINGLE, 9), math.nan, math.inf])
def test_one_requests_caches_may_be_those_of_a_near_tie_and_no_more(value: float) -> None:
    """Two of three requests are typical: the third may hold a near tie of experts that fell the other way."""
    usual = noisy(0.0, TYPICAL)
    assert found_in(usual, noisy(0.0, SINGLE), usual) == []
    [message] = found_in(usual, noisy(0.0, value), usual)
    assert f"state cache at end differs by {value:.3g} (relative RMS), allowed {SINGLE:.3g}" in message


@pytest.mark.parametrize("value", [math.nextafter(TYPICAL, 9), SINGLE])
def test_most_requests_beyond_the_floor_are_no_accident(value: float) -> None:
    fine, beyond = noisy(0.0, TYPICAL), noisy(0.0, value)
    assert found_in(fine, fine, beyond, beyond) == []
    [message] = found_in(fine, beyond, beyond)
    assert "state caches at end differ by" in message


def test_a_broken_contract_fails_with_its_words() -> None:
    result = {"schedule": "s", "raised": "", "broken": {"null rows zero": 7}, "requests": [], "floor": {}}
    [finding] = schedule_findings("schedule-s", result)
    assert "contract 'null rows zero' is broken in 7 words, 0 are allowed" in finding.message


def test_scenarios_stay_within_their_texts() -> None:
    texts = [list(range(TEXT_LENGTH)) for _ in range(6)]
    for name, scenario in SCENARIOS.items():
        for comparison in scenario(texts):
            for schedule in (comparison.judged, *comparison.references):
                submits = [event for event in schedule.events if isinstance(event, Submit)]
                assert all(s.continuation for s in submits), name
                names = [s.request for s in submits]
                assert len(set(names)) == len(names), name
            referred = [e.request for s in comparison.references for e in s.events if isinstance(e, Submit)]
            assert all(referred.count(request) == 1 for request in comparison.requests), name


@pytest.mark.parametrize(
    ("schedules", "reason"),
    [(["slot-reuse", "slot-reuse"], "a list of different names"), (["nothing"], "batch-bins"), ("poison", "a list")],
)
def test_schedules_that_do_not_exist_are_refused(schedules: Any, reason: str) -> None:
    error = ParityGate().settings_error({**SETTINGS, "schedules": schedules}) or ""
    assert reason in error


def test_a_target_without_schedules_is_refused_when_a_profile_asks_for_them() -> None:
    class Plain:
        name = "plain"
        capabilities: frozenset[Any] = frozenset()

        def __getattr__(self, name: str) -> Any:
            return getattr(small_target(), name)

    context = context_of(SETTINGS, target=Plain())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot play schedules; take `schedules` out of the profile"):
        ParityGate().arms(context)


def test_a_block_whose_key_forgets_what_came_before_it_is_found() -> None:
    def unchained(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def longest(self, tokens: Any) -> Any:
                for end in range((len(tokens) - 1) // self._block * self._block, 0, -self._block):
                    for entry in self._entries.values():
                        if len(entry.tokens) == end and entry.tokens[-self._block :] == tuple(
                            tokens[end - self._block : end]
                        ):
                            return entry
                return None

        return Faulty

    broken = Fault(
        "made-up", "x", "prefix_cache", (), (ENGINE,), lambda p: {"prefix_cache": unchained(p["prefix_cache"])}
    )
    result = played("warm-prefix", broken)
    assert result.verdict is Verdict.FAIL
    assert {finding.message.split(":")[0] for finding in result.findings} == {"warm-prefix 0, request late"}


@pytest.mark.parametrize(
    "change", [{"top_p": 1.0}, {"temperature": 0.0}, {"seed": 77}], ids=["top-p", "temperature", "seed"]
)
def test_a_request_that_is_sampled_with_what_it_did_not_ask_for_is_found(change: dict[str, Any]) -> None:
    def other(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def _sample(self, request: Any, logits: Any, position: int) -> int:
                asked, request.sampling = request.sampling, replace(request.sampling, **change)
                try:
                    return int(super()._sample(request, logits, position))
                finally:
                    request.sampling = asked

        return Faulty

    broken = Fault("made-up", "x", "engine", (), (ENGINE,), lambda p: {"engine": other(p["engine"])})
    result = played("slot-reuse", broken)
    assert result.verdict is Verdict.FAIL
    assert "which no request asked for" in result.findings[0].message
