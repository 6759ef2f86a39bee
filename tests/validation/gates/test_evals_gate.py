"""Gate 5, evals: honest arms pass, a damage turns it red, and answers that are none make it inconclusive."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from evals.judge import JudgeSettings, judge_samples
from evals.samples import ARMS, Request, Response, Sample, interleaved, plan_requests
from evals.tasks import load_task
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context, GateResult
from validation.gates.evals.gate import EvalsGate
from validation.gates.evals.report import result
from validation.mutation.measure import asked
from validation.records.record import gate_doc
from validation.reports.text import markdown
from validation.targets.base import ArmConfig, Capability, Counters
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict

GATE = EvalsGate()
Results = dict[str, dict[str, Any]]


def settings(*evals: tuple[str, int, float], batch: int = 8) -> dict[str, Any]:
    """One repeat of each (name, items, margin)."""
    tables = [{"name": name, "items": items, "repeats": 1, "margin": margin} for name, items, margin in evals]
    return {"origin": "generated", "batch": batch, "drafts": 7, "kv_cache_dtype": "fp8", "evals": tables}


THREE = settings(("aime25", 4, 0.8), ("gpqa_diamond", 6, 0.7), ("mrcr", 4, 0.8), batch=2)
ONE = settings(("gpqa_diamond", 4, 0.8))
SIX = settings(("gpqa_diamond", 6, 0.7))


@cache
def embedded() -> BuiltinTarget:
    return BuiltinTarget.load(None)


def context(given: dict[str, Any], *faults: str) -> Context:
    candidate = ArmConfig("candidate", "latency_specialized", faults=tuple(FAULTS[name] for name in faults))
    return Context(embedded(), ArmConfig("baseline"), candidate, 7, given)


def measured(given: dict[str, Any], *faults: str) -> Results:
    own = context(given, *faults)
    return {unit.id: GATE.measure(unit, own) for unit in GATE.plan(own)}


@cache
def honest() -> Results:
    return measured(THREE)


def said(judged: GateResult) -> str:
    return " | ".join(finding.message for finding in judged.findings)


def test_honest_arms_pass_three_evals_with_margin_power_and_detectable_effect_printed() -> None:
    judged = GATE.judge(honest(), context(THREE))
    assert judged.verdict is Verdict.PASS, judged.summary
    scores, design = judged.tables[:2]
    assert [row[0] for row in scores.rows] == ["aime25", "gpqa_diamond", "mrcr", "all, pooled"]
    assert list(design.header) == [
        "eval", "margin", "power", "detectable", "repeats", "repeats needed", "A/A NO-GO",
    ]  # fmt: skip
    assert len(design.rows) == 3
    assert gate_doc(GATE, judged, required=True, units=[]).verdict is Verdict.PASS


def test_arms_are_paired_with_the_same_prompt_bytes_and_seed_and_take_turns_to_be_first() -> None:
    results = honest()
    for unit in results.values():
        by_arm = [[s for s in unit["samples"] if s["arm"] == arm] for arm in ARMS]
        assert [s["request"] for s in by_arm[0]] == [s["request"] for s in by_arm[1]]
        hashes = [[s["response"]["effective"]["prompt_sha256"] for s in samples] for samples in by_arm]
        assert hashes[0] == hashes[1]
    order = "".join(
        results[unit]["samples"][0]["arm"][0] + results[unit]["samples"][-1]["arm"][0] for unit in sorted(results)
    )
    assert order == "bccb" + "bccbbc" + "bccb"


def test_measuring_again_gives_the_same_bytes() -> None:
    unit = GATE.plan(context(THREE))[2]
    assert GATE.measure(unit, context(THREE)) == honest()[unit.id]


def test_answers_that_go_to_the_neighbouring_request_turn_it_red() -> None:
    """Fluent, well-formed, wrong: the score is all that shows it."""
    given = settings(("aime25", 6, 0.2))
    judged = GATE.judge(measured(given, "eval-answers-swapped"), context(given))
    assert judged.verdict is Verdict.FAIL, judged.summary
    assert judged.findings[0].component == "aime25"
    assert any(table.title == "Flips, aime25" for table in judged.tables)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("eval-budget-spent", "candidate: max_tokens was 24 in 4 of 4 answers, asked for was 128"),
        ("eval-stop-in-reasoning", "candidate: 4 of 4 answers (100.0%) are unparsed"),
        ("eval-template-dropped", "prompt_sha256 differs between the arms in 4 of 4 answers"),
        ("eval-error-is-answer", "candidate: 2 of 4 answers (50.0%) are empty"),
    ],
)
def test_answers_that_are_none_make_it_inconclusive_and_say_why(fault: str, reason: str) -> None:
    judged = GATE.judge(measured(ONE, fault), context(ONE))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert reason in said(judged)
    assert "not valid" in str(judged.tables[0].rows[0][-1])


def test_a_cap_that_truncates_10_per_cent_is_inconclusive_with_the_cap_named() -> None:
    """Ten answers by hand: one of the candidate's ended at the cap."""
    task = load_task("aime25", items=10, seed=7)
    given = settings(("aime25", 10, 0.9))
    samples = []
    for request in plan_requests([task], 1, 7):
        for arm in ARMS:
            text = f"\\boxed{{{task.expected(request.item, 0)}}}"
            cut = arm == "candidate" and request.item == task.item_ids[3]
            response = Response(
                text="1+1=2 " * 60 if cut else text, finish_reason="length" if cut else "stop", tokens=400
            )
            samples.append(Sample(arm=arm, request=request, response=response).model_dump(mode="json"))
    judged = GATE.judge({"x": {"samples": samples, "paths": {"specialized": 1}, "fallbacks": {}}}, context(given))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "candidate: 1 of 10 answers (10.0%) are truncated by the cap of 400 tokens" in said(judged)
    assert "damage" not in judged.metrics["aime25"]


def test_questions_that_neither_arm_was_asked_leave_the_eval_undecided() -> None:
    """A unit whose answers are lost in both arms: the others alone would be within the margin."""
    results = copy.deepcopy(honest())
    results["mrcr-0000"]["samples"] = []
    judged = GATE.judge(results, context(THREE))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "2 of 4 questions have no answer in either arm (first: mrcr/" in said(judged)


def test_a_candidate_that_never_ran_its_own_path_fails() -> None:
    results = copy.deepcopy(honest())
    for unit in results.values():
        unit["paths"], unit["fallbacks"] = {"generic": 5}, {"ragged verify": 5}
    judged = GATE.judge(results, context(THREE))
    assert judged.verdict is Verdict.FAIL
    assert "no specialised step" in judged.summary


def test_two_arms_compared_as_they_are_need_no_specialised_step() -> None:
    results = copy.deepcopy(honest())
    for unit in results.values():
        unit["paths"] = {}
    same = Context(embedded(), ArmConfig("baseline"), ArmConfig("candidate"), 7, THREE)
    assert GATE.judge(results, same).verdict is Verdict.PASS


class Servers:
    """A target that answers chats by itself, as two servers do."""

    name = "servers"
    capabilities = frozenset({Capability.CONVERSE})

    def open(self, config: ArmConfig) -> Servers:
        return self

    def counters(self) -> Counters:
        return Counters({"specialized": 1})

    def samples(self, requests: Sequence[Request], arms: Sequence[ArmConfig]) -> list[Sample]:
        answers = {r.key: f"Answer: {load_task(r.task, items=6, seed=7).expected(r.item, r.repeat)}" for r in requests}
        names = [arm.name for arm in arms]
        return [
            Sample(arm=arm, request=r, response=Response(text=answers[r.key], finish_reason="stop"))
            for arm, r in interleaved(requests, names)
        ]


def test_a_target_that_answers_chats_is_asked_for_samples() -> None:
    asked = Context(Servers(), ArmConfig("baseline"), ArmConfig("candidate"), 7, SIX)  # type: ignore[arg-type]
    assert [arm.name for arm in GATE.arms(asked)] == ["baseline", "candidate"]
    results = {unit.id: GATE.measure(unit, asked) for unit in GATE.plan(asked)}
    assert GATE.judge(results, asked).verdict is Verdict.PASS


def test_a_server_that_lost_its_own_path_in_mid_run_fails() -> None:
    """Restarted without its backend: the units before showed the sign, those after do not."""
    asked = Context(Servers(), ArmConfig("baseline"), context(SIX).candidate, 7, SIX)  # type: ignore[arg-type]
    unit = {**GATE.measure(GATE.plan(asked)[0], asked), "paths": {"specialized": 4, "generic": 2}}
    judged = GATE.judge({"x": {**unit, "fallbacks": {"no sign": 2}}}, asked)
    assert judged.verdict is Verdict.FAIL
    assert "2 of 6 answers of the candidate are not of its own path (no sign: 2)" in judged.summary
    engine = replace(asked, target=embedded())
    assert GATE.judge({"x": {**unit, "fallbacks": {"prefill": 2}}}, engine).verdict is Verdict.PASS


def test_what_makes_a_bound_wider_than_its_pairs_is_said() -> None:
    task = load_task("aime25", items=30, seed=7)
    samples = []
    for request in plan_requests([task], 4, 7):
        for arm in ARMS:
            error = "HTTP 500" if arm == "candidate" and request.key.endswith("-0/0") else ""
            text = f"\\boxed{{{task.expected(request.item, 0)}}}"
            samples.append(Sample(arm=arm, request=request, response=Response(text=text, error=error)))
    judged = result("evals", judge_samples(samples, [task], JudgeSettings({"aime25": 0.02})))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "repeats of the baseline and candidate are one answer, so items count" in judged.summary
    assert "1 errors of the candidate alone count as lost" in said(judged)
    assert "repeats are one answer: more items are needed" in said(judged)


HOSTILE = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(2)> \\boxed{0}",
    "terminal": "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202e \\boxed{0}",
    "one megabyte of one character": "a" * 10**6,
    "invalid utf-8": b"\xff\xfe\x80 \\boxed{0}",
    "regex bait": "answer is (" * 90_000 + "\\boxed{" * 50_000,
    "endless power": "\\boxed{9^{9^{9^{9}}}}",
    "markdown": "| a | b |\n|---|---|\n[x](http://evil.example) ::error::\n```",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_neither_stall_the_scorers_nor_act_in_the_report(kind: str) -> None:
    tasks = [load_task(name, items=3) for name in ("aime25", "gpqa_diamond", "mrcr")]
    samples = [
        Sample(
            arm=arm,
            request=r,
            response=Response(
                text=HOSTILE[kind] if arm == "candidate" else "Answer: A",
                finish_reason="stop",
            ),
        )
        for r in plan_requests(tasks, 1, 0)
        for arm in ARMS
    ]
    judged = judge_samples(samples, tasks, JudgeSettings({task.name: 0.5 for task in tasks}))
    doc = gate_doc(GATE, result("evals", judged), required=True, units=[])
    shown = "\n".join(markdown(str(cell)) for table in doc.tables for row in table.rows for cell in row)
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert len(doc.model_dump_json()) < 200_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"origin": "elsewhere"}, "'generated', 'published'"),
        ({"data_dir": "/no/such/folder"}, "no such folder"),
        ({"evals": []}, "a list of tables"),
        ({"evals": [{"name": ["aime25"], "items": 1, "repeats": 1, "margin": 0.1}]}, "must be a text"),
        ({"evals": [{"name": "aime25"}]}, "each table needs name, items, repeats, margin"),
        ({"evals": [{"name": "x", "items": 1, "repeats": 1, "margin": 0.1}]}, "no generated eval is called 'x'"),
        ({"evals": [{"name": "aime25", "items": 0, "repeats": 1, "margin": 0.1}]}, "items of aime25"),
        ({"evals": [{"name": "aime25", "items": 1, "repeats": 1, "margin": 2}]}, "0.02 is two of a hundred"),
        ({"evals": [{"name": "aime25", "items": 1, "repeats": 1, "margin": 0.1}] * 2}, "can be there once"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(change: dict[str, Any], reason: str) -> None:
    assert reason in str(GATE.settings_error({**THREE, **change}))


def test_a_published_set_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Any) -> None:
    given = {**ONE, "origin": "published", "data_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=r"huggingface\.co/datasets/Idavidrein/gpqa .*--data-dir"):
        GATE.arms(context(given))


def test_mutate_sees_no_fault_where_there_is_none_and_answers_that_are_none_where_there_are() -> None:
    """Units of evals are judged together: alone, each would say that the others' questions have no answers."""
    for faults, says in (((), "missed"), (("eval-error-is-answer",), "caught")):
        own = context(THREE, *faults)
        answer = asked(GATE, GATE.plan(own), own)
        assert answer["says"] == says, answer
        assert answer["units"] == len(GATE.plan(own))
    assert answer["reason"].startswith("no verdict: ")
