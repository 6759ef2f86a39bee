"""The fuzzer: healthy engines survive it, broken ones are found and shrunk, and what failed can be played again."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_k3 import context_of, small_target

from decode_impl.request import Finish
from numerics.logits import LogitStats
from validation.cli.app import main
from validation.errors import UsageError
from validation.faults.base import ENGINE, Fault
from validation.faults.catalogue import FAULTS
from validation.fuzz.case import Arrive, Case, Steps, Take, as_json, from_json
from validation.fuzz.corners import corners
from validation.fuzz.files import Subject, read, write_failure
from validation.fuzz.search import Searched, search
from validation.fuzz.texts import TEXT_LENGTH, TEXTS, random_texts
from validation.fuzz.trial import Trial, prepare
from validation.fuzz.verify import DRAFTS, verify_cases
from validation.fuzz.work import scheduling_faults
from validation.gates.parity.gate import ParityGate
from validation.targets.base import ArmConfig
from validation.verdict import Verdict

STEPS = 2000
"""Within so many engine steps an injected fault of the scheduler is found."""

OPERATIONS = 12
"""A failing case shrinks to so many at most."""

SHOWN = (
    "state-not-reset",
    "page-given-twice",
    "restore-lost-after-release",
    "batch-indices-baked",
    "engine-resume-without-recompute",
    "spec-column-zero",
)
"""One fault of every part of an engine; `decodegate fuzz --all-faults` asks for all of them."""

CONVERSATION = (Arrive(0, 10, 11, (2, 0)), Steps(20), Arrive(0, 24, 4, (1,)), Take("abort", 1), Steps(3))


@cache
def healthy() -> Trial:
    """The miniature without faults, prepared once."""
    candidate = ArmConfig("candidate", "latency_specialized")
    return prepare(small_target(), ArmConfig("baseline"), candidate, small=True, seed=0)


def broken(*faults: str) -> Trial:
    """The same with faults."""
    own = replace(healthy().candidate, faults=tuple(FAULTS[name] for name in faults))
    return Trial(healthy().target, own, healthy().reference)


@cache
def found(fault: str) -> Searched:
    return search(broken(fault), 0, STEPS, shrink_steps=150)


def test_a_healthy_engine_survives_random_schedules() -> None:
    searched = search(healthy(), 3, 150)
    assert searched.failure is None
    assert searched.steps >= 150


@pytest.mark.parametrize("fault", SHOWN)
def test_a_scheduling_fault_is_found_and_shrinks_to_a_few_operations(fault: str) -> None:
    failure = found(fault).failure
    assert failure is not None
    assert failure.found_after <= STEPS
    assert len(failure.case.operations) <= OPERATIONS
    assert healthy().findings(failure.case) == []


def test_the_same_seed_finds_the_same_case() -> None:
    again = search(broken("state-not-reset"), 0, STEPS, shrink_steps=150)
    assert again == found("state-not-reset")


def test_all_faults_of_the_scheduler_and_its_caches_are_asked_for() -> None:
    asked = {fault.id for fault in scheduling_faults(list(FAULTS.values()))}
    layers = ("state and pages", "prefix reuse", "layout of a step", "scheduling")
    by_layer = {f.id for f in FAULTS.values() if f.layer in layers and f.injectable and not f.equivalent}
    assert asked >= by_layer | {name for name in asked if name.startswith("spec-")}
    assert set(SHOWN) <= asked


def test_a_failing_case_is_a_file_that_fails_again_until_the_engine_is_right(tmp_path: Path, capsys: Any) -> None:
    failure = found("spec-column-zero").failure
    assert failure is not None
    path = tmp_path / "fuzz" / "case.json"
    write_failure(path, Subject(faults=("spec-column-zero",)), failure)
    assert main(["replay", str(path)]) == 1
    assert "request r" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert read(content)[1] == failure.case
    path.write_text(json.dumps({**content, "faults": []}))
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": {"operations": []}}, "has 0 operations"),
        ({"case": {"operations": [{"do": "fly"}]}}, "an operation has `do`"),
        ({"case": {"operations": [{"do": "run", "count": True}]}}, "count is True"),
        ({"case": {"operations": [{"do": "run", "count": 10**9}]}}, "count is 1000000000"),
        ({"case": {"operations": [{"do": "run"}]}}, "has exactly count"),
        ({"case": {"operations": [{"do": "run", "count": 1}], "max_batch": 10**6}}, "max_batch is 1000000"),
        ({"case": {"operations": [{"do": "run", "count": 1}], "lenient": 1}}, "an option 'lenient'"),
        ({"case": {"operations": [{"do": "take", "how": "kill", "request": 0}]}}, "`how` is 'kill'"),
        ({"faults": "spec-column-zero"}, "faults is a list"),
        ({"decode_backend": "fast"}, "decode_backend is one of"),
        ({"seed": -1}, "seed is a whole number"),
    ],
)
def test_a_file_that_is_no_case_is_refused_with_what_is_wrong(change: dict[str, Any], message: str) -> None:
    right = {"kind": "schedule", "miniature": True, "model": None, "decode_backend": "auto", "faults": [], "seed": 0}
    with pytest.raises(UsageError, match=message):
        read({**right, "case": as_json(Case(CONVERSATION)), **change})


def test_a_case_is_the_same_after_a_file() -> None:
    case = Case(CONVERSATION, max_batch=2, pages=7, prefix_snapshots=4, drafts=3, poisoned=True)
    assert from_json(json.loads(json.dumps(as_json(case)))) == case


def test_operations_that_do_not_apply_are_passed_over() -> None:
    case = Case((Take("abort", 3), *CONVERSATION, Take("preempt", 0), Take("abort", 0), Take("abort", 1)), drafts=3)
    assert healthy().findings(case) == []


def test_texts_of_other_beginnings_share_no_word() -> None:
    texts = random_texts(64, 1)
    assert len(texts) == TEXTS
    assert {len(text) for text in texts} == {TEXT_LENGTH}
    assert texts[1][:16] == texts[0][:16]
    assert not set(texts[0]) & set(texts[3])


def test_rows_of_another_request_are_known_for_what_they_are() -> None:
    def exchange(right: Any) -> Any:
        def faulty(*args: Any, **options: Any) -> Any:
            batch = right(*args, **options)
            both = batch.decode_rows == 2 and not batch.verify and not batch.sequences
            return replace(batch, logit_rows=torch.tensor([1, 0])) if both else batch

        return faulty

    fault = Fault("made-up", "x", "build_batch", (), (ENGINE,), lambda p: {"build_batch": exchange(p["build_batch"])})
    trial = Trial(healthy().target, replace(healthy().candidate, faults=(fault,)), healthy().reference)
    case = Case((Arrive(3, 1, 6), Arrive(0, 1, 6)), max_batch=2)
    assert healthy().findings(case) == []
    messages = trial.findings(case)
    assert any("they are those of text 0 after 1 tokens" in message for message in messages), messages


LATE = {
    "batch-rows-swapped-in-mixed-step": "a long prompt that joins two requests as they decode",
    "spec-prefix-of-last-column": "a prefix block that ends inside a verify step",
    "prefix-partial-match": "a prompt that shares one block of a longer cached one",
    "prefix-key-by-length": "a prompt of a cached one's length",
    "batch-one-token-prefill-stale": "two prompts of one token at once, after another request",
    "batch-table-cut": "a decode on the last page",
    "verify-null-slot-written": "verify steps with a null request",
    "verify-null-conv-written": "verify steps with a null request",
    "dcp-written-by-next-rank": "contexts dealt out to two ranks",
    "dcp-gathered-by-rank": "contexts dealt out to two ranks",
}
"""Faults for which drawn schedules need luck, and the corner that shows them."""


def test_healthy_engines_pass_every_corner_which_take_no_more_steps_than_a_few_cases() -> None:
    start = healthy().steps.total()
    assert {name: healthy().findings(case) for name, case in corners()} == {name: [] for name, _ in corners()}
    assert healthy().steps.total() - start < 100


@pytest.mark.parametrize(("fault", "corner"), LATE.items(), ids=list(LATE))
def test_a_fault_that_needs_luck_is_found_by_its_corner_and_shrunk(fault: str, corner: str) -> None:
    assert broken(fault).findings(dict(corners())[corner])
    found = search(broken(fault), 0, STEPS, first=[case for _, case in corners()])
    assert found.failure is not None
    assert found.failure.found_after < 100
    assert len(found.failure.case.operations) <= OPERATIONS


def test_verify_steps_are_played_with_every_number_of_right_drafts() -> None:
    seen = {(case.drafts, arrival.accepted[0]) for _, case in verify_cases() for arrival in case.arrivals()}
    assert seen == {(drafts, accepted) for drafts in DRAFTS for accepted in range(drafts + 1)}


@pytest.mark.parametrize("fault", ["verify-width-6", "spec-one-token-too-few", "verify-conv-not-rolled"])
def test_state_is_looked_at_right_after_every_verify_step(fault: str) -> None:
    drafts = {"verify-width-6": 5}.get(fault, 3)
    case = next(case for _, case in verify_cases() if case.drafts == drafts)
    assert healthy().findings(case) == []
    assert any(
        "cache after the verify step" in message or "logits" in message for message in broken(fault).findings(case)
    )


def test_the_command_finds_a_fault_and_keeps_its_case(tmp_path: Path, capsys: Any) -> None:
    code = main(["fuzz", "--fault", "null-page-poisoned", "--steps", "60", "--workers", "1", "--out", str(tmp_path)])
    assert code == 0
    assert "decodegate replay" in capsys.readouterr().out
    assert (tmp_path / "fuzz" / "null-page-poisoned-0.json").is_file()


def test_a_wrong_fault_or_model_is_refused(capsys: Any) -> None:
    assert main(["fuzz", "--fault", "no-such-fault"]) == 2
    assert main(["fuzz", "--model", "somewhere"]) == 2
    assert "--whole-model" in capsys.readouterr().err


GATE = {
    "prompt_length": 8,
    "decode_length": 4,
    "min_sequences": 2,
    "cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}],
    "fuzz_seeds": 1,
    "fuzz_steps": 20,
}


def test_a_failing_search_fails_the_parity_gate_and_its_case_is_kept_for_replay() -> None:
    context, gate = context_of(GATE, faults=(FAULTS["null-page-poisoned"],)), ParityGate()
    assert gate.settings_error(GATE) is None
    [unit] = [unit for unit in gate.plan(context) if unit.id == "fuzz-0"]
    result = gate.judge({unit.id: gate.measure(unit, context)}, context)
    assert result.verdict is Verdict.FAIL
    assert "1 of 1 units broken" in result.summary
    subject, case = read(result.metrics["replays"]["fuzz-0"])
    assert subject.faults == ("null-page-poisoned",)
    assert len(case.operations) <= OPERATIONS


def test_seeds_and_steps_are_given_together() -> None:
    assert "given together" in str(ParityGate().settings_error({k: v for k, v in GATE.items() if k != "fuzz_steps"}))


def test_what_the_parity_gate_keeps_of_a_token_does_not_grow_with_the_vocabulary() -> None:
    def kept(tokens: int, vocabulary: int) -> int:
        stats = LogitStats()
        for _ in range(tokens):
            rows = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
            stats.add(rows, rows + 0.1)
        return len(pickle.dumps({name: value.numpy() for name, value in stats.per_token().items()}))

    assert kept(64, 5000) == kept(64, 500)
    # Per token a few figures of 8 bytes, however long the text: a row of 5,000 logits would be 20,000.
    assert (kept(128, 500) - kept(64, 500)) / 64 < 200


def faulty(component: str, wrong: Any) -> Trial:
    """The miniature with a fault that is in no catalogue."""
    fault = Fault("made-up", "x", component, (), (ENGINE,), lambda parts: {component: wrong(parts[component])})
    return Trial(healthy().target, replace(healthy().candidate, faults=(fault,)), healthy().reference)


def drops_a_waiting_one(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def abort(self, request_id: str) -> None:
            super().abort(request_id)
            if self._waiting:
                self._waiting.popleft()

    return Faulty


def ends_a_running_one(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def abort(self, request_id: str) -> None:
            super().abort(request_id)
            for request in self._running[-1:]:
                self._end(request, Finish.ABORT)

    return Faulty


@pytest.mark.parametrize("wrong", [drops_a_waiting_one, ends_a_running_one])
def test_an_abort_excuses_the_aborted_request_and_no_other(wrong: Any) -> None:
    [case] = [case for name, case in corners() if name.startswith("an abort")]
    assert healthy().findings(case) == []
    messages = faulty("engine", wrong).findings(case)
    assert any("tokens were never predicted" in message for message in messages), messages


def test_what_ranks_beyond_the_first_keep_of_a_prefix_is_asked_for() -> None:
    def first_rank_alone(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def restore(self, slot: int, snapshot: Any) -> None:
                for pools, saved in ((self.conv, snapshot.conv), (self.state, snapshot.state)):
                    for ((_, rank), pool), one in zip(pools.items(), saved, strict=True):
                        if rank == 0:
                            pool[slot] = one

        return Faulty

    [case] = [case for name, case in corners() if name.startswith("contexts dealt out")]
    assert healthy().findings(case) == []
    assert faulty("state_cache", first_rank_alone).findings(case)


def test_caches_that_were_never_there_to_be_looked_at_are_no_pass() -> None:
    def one_short(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def add(self, request_id: str, prompt: Any, max_tokens: int, *rest: Any) -> None:
                super().add(request_id, prompt, max_tokens - 1, *rest)

        return Faulty

    case = Case((Arrive(0, 12, 6),))
    assert healthy().findings(case) == []
    assert "its caches at the end were not there" in faulty("engine", one_short).findings(case)[0]
