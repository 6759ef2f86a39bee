"""Gate 4, stability: honest arms pass, and each way in which a long answer can fall apart turns it red."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from evals.statistics import mcnemar_worse
from validation.faults.base import ENGINE, Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context, GateResult, Unit
from validation.gates.stability.gate import StabilityGate
from validation.gates.stability.measure import _misended
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget
from validation.targets.text import Answer, Ask
from validation.verdict import Verdict

GATE = StabilityGate()
SETTINGS = {
    "chains": 3,
    "chain_tokens": 60,
    "texts": 3,
    "text_tokens": 24,
    "drift_sequences": 2,
    "drift_tokens": 48,
    "batch": 3,
    "drafts": 7,
    "kv_cache_dtype": "fp8",
}

Results = dict[str, dict[str, Any]]


def context(*faults: str, seed: int = 0) -> Context:
    candidate = ArmConfig("candidate", "latency_specialized", faults=tuple(FAULTS[name] for name in faults))
    return Context(embedded(), ArmConfig("baseline"), candidate, seed, SETTINGS)


@cache
def embedded() -> BuiltinTarget:
    return BuiltinTarget.load(None)


@cache
def honest() -> Results:
    return {unit.id: GATE.measure(unit, context()) for unit in GATE.plan(context())}


def unit_of(name: str, planned: Context | None = None) -> Unit:
    """The unit of this name, wherever the plan has it."""
    [unit] = [unit for unit in GATE.plan(planned or context()) if unit.id == name]
    return unit


def judged(change: Callable[[Results], None]) -> GateResult:
    """The judgement of honest measurements after a change."""
    results = copy.deepcopy(honest())
    change(results)
    return GATE.judge(results, context())


def many(results: Results, task: str = "chains", copies: int = 4) -> None:
    """As if each prompt had been several: enough for the exact tests to have power."""
    for arm in ("baseline", "candidate", "floor"):
        results[task][arm] = copy.deepcopy(results[task][arm] * copies)
    results[task]["prompts"] *= copies


def test_honest_arms_pass_and_the_candidates_own_path_ran() -> None:
    result = GATE.judge(honest(), context())
    assert result.verdict == Verdict.PASS, result.summary
    assert honest()["chains"]["paths"]["specialized"] > 0
    assert {f["right"] for f in honest()["chains"]["baseline"]} == {1.0}
    assert all(f["acceptance"] for f in honest()["chains"]["candidate"])


def test_the_same_seed_measures_the_same() -> None:
    unit = unit_of("text")
    assert GATE.measure(unit, context()) == honest()["text"]


@pytest.mark.parametrize("fault", ["draft-wrong-tap", "draft-context-missing"])
def test_a_fault_that_leaves_text_alone_shows_in_acceptance(fault: str) -> None:
    unit = unit_of("chains")
    measured = {**honest(), unit.id: GATE.measure(unit, context(fault))}
    result = GATE.judge(measured, context(fault))
    assert result.verdict == Verdict.FAIL
    assert {finding.component for finding in result.findings} == {"drafter"}
    assert {f["right"] for f in measured[unit.id]["candidate"]} == {1.0}


def test_a_fault_of_the_decode_shows_along_the_text() -> None:
    unit = unit_of("drift")
    result = GATE.judge({**honest(), unit.id: GATE.measure(unit, context("kda-delta-dropped"))}, context())
    assert result.verdict == Verdict.FAIL
    assert {finding.component for finding in result.findings} & {"logits", "drift"}


def test_one_answer_that_ends_in_nan_is_enough() -> None:
    def change(results: Results) -> None:
        results["text"]["candidate"][1] |= {"finish": "error", "error": "logits at position 60 hold NaN or infinity"}

    result = judged(change)
    assert result.verdict == Verdict.FAIL
    assert "hold NaN" in result.findings[0].message


def test_answers_that_loop_in_the_candidate_alone_fail() -> None:
    def change(results: Results) -> None:
        many(results, "text")
        for figures in results["text"]["candidate"][:10]:
            figures["loop_onset"] = 7

    result = judged(change)
    assert "loops" in {finding.component for finding in result.findings}


def test_eight_texts_of_premerge_that_loop_are_enough() -> None:
    settings = {**SETTINGS, "texts": 8, "text_tokens": 48, "batch": 8, "text_drafts": 3}
    looping = replace(context("long-loops"), settings=settings)
    unit = unit_of("text", looping)
    measured = {unit.id: GATE.measure(unit, looping)}
    result = GATE.judge(measured, looping)
    assert "loops" in {finding.component for finding in result.findings}, result.summary


def test_answers_of_token_0_in_the_candidate_alone_fail() -> None:
    def change(results: Results) -> None:
        many(results, "text")
        for figures in results["text"]["candidate"][:10]:
            figures["zero_tokens"] = 1

    assert {finding.component for finding in judged(change).findings} == {"token 0"}


def test_answers_that_loop_in_both_arms_do_not() -> None:
    def change(results: Results) -> None:
        many(results, "text")
        for arm in ("baseline", "candidate"):
            for figures in results["text"][arm][:10]:
                figures["loop_onset"] = 7

    assert judged(change).verdict == Verdict.PASS


def test_answers_that_are_cut_off_or_wrong_fail() -> None:
    def cut(results: Results) -> None:
        many(results)
        for figures in results["chains"]["candidate"][:10]:
            figures |= {"finish": "length", "right": 0.6}

    components = {finding.component for finding in judged(cut).findings}
    assert {"cut off", "wrong", "right tokens"} <= components


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_entropy_that_collapses_or_bursts_fails(factor: float) -> None:
    def change(results: Results) -> None:
        for figures in results["text"]["candidate"]:
            figures["entropy"] = [value * factor for value in figures["entropy"]]

    assert "entropy" in {finding.component for finding in judged(change).findings}


def test_a_state_that_grows_fails() -> None:
    def change(results: Results) -> None:
        for figures in results["chains"]["candidate"]:
            figures["norms"] = [(place, norm * 1.2) for place, norm in figures["norms"]]

    assert "state" in {finding.component for finding in judged(change).findings}


def test_kl_that_grows_along_the_text_fails() -> None:
    def change(results: Results) -> None:
        drift = results["drift"]
        drift["candidate"]["log_kl"] = [
            [log + quarter for log in logs] for quarter, logs in enumerate(drift["floor"]["log_kl"])
        ]

    result = judged(change)
    assert {"drift", "logits"} <= {finding.component for finding in result.findings}


def test_a_candidate_whose_path_never_ran_is_not_judged_green() -> None:
    def change(results: Results) -> None:
        results["chains"]["paths"] = {"generic": 40}

    result = judged(change)
    assert result.verdict == Verdict.FAIL
    assert "no specialised step" in result.findings[0].message


def test_evidence_that_cannot_rule_out_a_slower_drafter_is_inconclusive() -> None:
    def change(results: Results) -> None:
        for i, figures in enumerate(results["chains"]["candidate"]):
            for counted in figures["acceptance"].values():
                counted[1] = max(0, counted[1] + (-4, 0, 4)[i] * counted[0])

    result = judged(change)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "acceptance from place" in result.summary


def test_drafts_on_a_target_without_them_are_refused_before_anything_is_measured() -> None:
    class Mute(BuiltinTarget):
        capabilities = frozenset()

    mute = replace(context(), target=Mute(embedded()._checkpoint, embedded()._folder))
    with pytest.raises(ValueError, match="has no drafts; set drafts = 0"):
        GATE.arms(mute)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"drafts": -1}, "0 to 64"), ({"chains": 0}, "1 to"), ({"kv_cache_dtype": "int8"}, "bf16"), ({"x": 1}, "unknown")],
)
def test_settings_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    assert message in str(GATE.settings_error(SETTINGS | change))
    assert GATE.settings_error(SETTINGS) is None


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 1 / 32), (0, 5, 1.0), (3, 1, 5 / 16)])
def test_the_paired_test_is_mcnemars_exact_one(lost: int, gained: int, p: float) -> None:
    assert mcnemar_worse(lost, gained) == pytest.approx(p)


def test_texts_may_have_a_batch_and_drafts_of_their_own() -> None:
    settings = {**SETTINGS, "text_batch": 2, "text_drafts": 3}
    own = replace(context(), settings=settings)
    assert GATE.settings_error(settings) is None
    shapes = {(arm.max_batch, arm.drafts) for arm in GATE.arms(own)}
    assert shapes == {(3, 7), (2, 3), (2, 0)}
    unit = unit_of("text", own)
    measured = GATE.measure(unit, own)
    most = [max(int(bucket[1] / bucket[0]) for bucket in f["acceptance"].values()) for f in measured["candidate"]]
    assert max(most) <= 3
    assert GATE.judge({**honest(), "text": measured}, own).verdict == Verdict.PASS
    assert "text_drafts is 65" in (GATE.settings_error({**settings, "text_drafts": 65}) or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish": "length"}, "ended by its length with"),
        ({"tokens": (5, 6, 7), "finish": "length"}, "ended by its length with 3 tokens of"),
        ({"tokens": (5, 6, 7), "finish": "stop"}, "ended by a stop token that it does not have"),
        ({"behind": True}, "goes on behind its stop token, by 1 tokens"),
    ],
)
def test_one_answer_that_does_not_end_as_it_says_is_enough(change: dict[str, Any], said: str) -> None:
    ask = Ask((1, 2), 40, 0, stop_tokens=(9,))
    honest_one = Answer((5, 6, 9), "stop", "", (), [], {})
    assert _misended(ask, honest_one) == ""
    tokens = (5, 9, 6) if change.pop("behind", False) else honest_one.tokens
    assert said in _misended(ask, replace(honest_one, **{"tokens": tokens, **change}))
    result = judged(lambda results: results["text"]["candidate"][1].update(misended=said))
    assert result.verdict == Verdict.FAIL
    assert {finding.component for finding in result.findings} == {"end"}


@pytest.mark.parametrize("silent", ["beyond a place", "two steps of three"])
def test_a_drafter_that_falls_silent_is_a_slower_one(silent: str) -> None:
    def mute(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            asked = 0

            def draft(self, anchors: Any, indices: Any, *rest: Any) -> Any:
                self.asked += 1
                late = indices >= 110 if silent == "beyond a place" else indices * 0 + self.asked % 3 > 0
                return super().draft(anchors, indices, *rest).masked_fill(late[:, None], -1)

        return Faulty

    fault = Fault("made-up", "x", "drafter", (), (ENGINE,), lambda parts: {"drafter": mute(parts["drafter"])})
    own = replace(context(), candidate=replace(context().candidate, faults=(fault,)))
    result = GATE.judge({**honest(), "chains": GATE.measure(GATE.plan(own)[0], own)}, own)
    assert "drafter" in {finding.component for finding in result.findings}, result.summary


def test_drift_that_the_other_path_decoded_is_not_judged_green() -> None:
    result = judged(lambda results: results["drift"].update(elsewhere=3))
    assert result.verdict == Verdict.FAIL
    assert "3 of 32 rows that were judged are none of the candidate's own path" in result.findings[0].message


def test_a_drafter_that_loses_its_rows_with_a_prefix_hit_is_a_slower_one() -> None:
    def holes(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def _admit(self) -> None:
                before = list(self._running)
                super()._admit()
                for request in self._running:
                    if request not in before and request.computed:
                        for page in request.pages:
                            self.runner.drafter.cache[page] = self.runner.drafter.latents[page] = 0

        return Faulty

    fault = Fault("made-up", "x", "engine", (), (ENGINE,), lambda parts: {"engine": holes(parts["engine"])})
    own = replace(context(), candidate=replace(context().candidate, faults=(fault,)))
    [unit] = [unit for unit in GATE.plan(own) if unit.id == "again"]
    measured = GATE.measure(unit, own)
    result = GATE.judge({**honest(), "again": measured}, own)
    assert {finding.component for finding in result.findings} == {"drafter"}, result.summary
    assert {f["right"] for f in measured["candidate"]} == {1.0}
