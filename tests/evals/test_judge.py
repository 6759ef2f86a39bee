"""The decision on samples, whoever produced them: validity first, three outcomes, and what is always said."""

from __future__ import annotations

import numpy as np
import pytest
from answering import Answering, judged, right, samples, worse

from evals.judge import JudgeSettings, judge_samples
from evals.samples import Request, Response
from evals.statistics import Outcome
from evals.tasks import load_task


def test_equal_arms_are_go_and_the_evidence_says_what_it_could_decide() -> None:
    result = judged(right)
    task = result.tasks["aime25"]
    assert result.outcome is Outcome.GO
    assert task.decision is not None
    assert task.design is not None
    assert task.decision.upper == pytest.approx(np.log(20) / 240)  # no loss in 240 pairs: the rule of three
    assert task.design.power > 0.8
    assert task.design.repeats_needed is not None
    assert task.design.repeats_needed <= 8


def test_a_damage_beyond_the_margin_is_no_go() -> None:
    result = judged(worse(0.3))
    assert result.outcome is Outcome.NO_GO
    decision = result.tasks["aime25"].decision
    assert decision is not None
    assert decision.lower > 0.02
    assert decision.adjusted < 0.05


def test_too_few_answers_are_undecided_and_say_how_many_repeats_decide() -> None:
    task = judged(right, repeats=1).tasks["aime25"]
    assert task.outcome is Outcome.UNDECIDED
    assert task.design is not None
    assert task.design.repeats_needed is not None
    assert task.design.repeats_needed > 1
    assert task.design.detectable > 0.02


def test_three_evals_are_judged_apart_and_pooled() -> None:
    names = ("aime25", "gpqa_diamond", "mrcr")
    result = judged(right, names)
    assert result.outcome is Outcome.GO
    assert result.pooled is not None
    assert result.pooled.outcome is Outcome.GO
    assert result.pooled.upper < max(t.decision.upper for t in result.tasks.values() if t.decision)


def test_one_bad_eval_is_no_go_whatever_the_others_say() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        spoiled = arm == "candidate" and request.task == "gpqa_diamond" and request.repeat % 2
        return right(arm, request, "Answer: Z or so, \\boxed{A}" if spoiled else text)

    result = judged(answer, ("aime25", "gpqa_diamond"))
    assert result.outcome is Outcome.NO_GO
    assert result.tasks["aime25"].outcome is Outcome.GO


def test_an_a_a_run_is_never_no_go_in_200_runs() -> None:
    """Two per cent of all answers are wrong, in both arms alike; 6 items, 8 repeats, margin two points."""
    task = load_task("aime25", items=6)
    runs = [
        judge_samples(samples([task], 8, worse(0.02, seed, equally=True)), [task], JudgeSettings({"aime25": 0.02}))
        for seed in range(200)
    ]
    assert sum(run.outcome is Outcome.NO_GO for run in runs) == 0


def test_order_of_arrival_does_not_matter() -> None:
    task = load_task("aime25", items=10)
    given = samples([task], 4, worse(0.3))
    settings = JudgeSettings({"aime25": 0.02})
    shuffled = [given[i] for i in np.random.default_rng(1).permutation(len(given))]
    assert judge_samples(given, [task], settings) == judge_samples(shuffled, [task], settings)


def test_greedy_repeats_are_one_answer_and_not_many() -> None:
    task = load_task("aime25", items=30)
    given = [
        s.model_copy(update={"request": s.request.model_copy(update={"temperature": 0.0})})
        for s in samples([task], 8, right)
    ]
    decision = judge_samples(given, [task], JudgeSettings({"aime25": 0.02})).tasks["aime25"].decision
    assert decision is not None
    assert decision.upper == pytest.approx(np.log(20) / 30)
    assert decision.outcome is Outcome.UNDECIDED


def errors(number: int, arms: tuple[str, ...] = ("candidate",), text: str = "") -> Answering:
    """Errors in the first questions of these arms, whose other arm says `text` where one is given."""

    def answer(arm: str, request: Request, told: str) -> Response:
        if int(request.item.split("-")[1]) * 8 + request.repeat >= number:
            return right(arm, request, told)
        return Response(error="HTTP 500") if arm in arms else right(arm, request, text or told)

    return answer


def test_errors_of_the_candidate_alone_count_as_lost_in_the_upper_bound() -> None:
    """Four of 240 are within two points, and so is the damage of the rest: together they are not."""
    task = judged(errors(4)).tasks["aime25"]
    assert len(task.unanswered) == 4
    assert not task.invalid
    assert task.decision is not None
    assert task.decision.damage == 0
    assert task.decision.lower <= 0
    assert task.decision.upper > 0.02
    assert task.outcome is Outcome.UNDECIDED


def test_errors_alone_are_never_a_no_go() -> None:
    task = judged(errors(12), margin=0.05).tasks["aime25"]
    assert task.outcome is Outcome.UNDECIDED
    assert task.decision is not None
    assert task.decision.lower < 0


@pytest.mark.parametrize("given", [errors(4, ("baseline",)), errors(4, ("baseline", "candidate"))])
def test_an_error_of_the_baseline_hides_no_answer_of_the_candidate(given: Answering) -> None:
    task = judged(given).tasks["aime25"]
    assert not task.unanswered
    assert task.outcome is Outcome.GO


def test_a_candidate_can_lose_no_answer_that_the_baseline_had_wrong() -> None:
    task = judged(errors(4, text="\\boxed{1000}")).tasks["aime25"]
    assert len(task.unanswered) == 4
    assert task.outcome is Outcome.GO


def test_looks_before_the_end_use_less_of_the_error_rate() -> None:
    task = load_task("aime25", items=30)
    given = samples([task], 8, right)
    last, early = (
        judge_samples(given, [task], JudgeSettings({"aime25": 0.02}, looks=looks)).tasks["aime25"].decision
        for looks in ((1.0,), (0.5,))
    )
    assert last is not None
    assert early is not None
    assert early.upper > last.upper


@pytest.mark.parametrize("change", ["twice", "unknown item", "unknown arm", "unknown task"])
def test_samples_that_cannot_be_this_comparisons_are_refused(change: str) -> None:
    task = load_task("aime25", items=3)
    given = samples([task], 1, right)
    first = given[0]
    strange = {
        "twice": first,
        "unknown item": first.model_copy(update={"request": first.request.model_copy(update={"item": "x"})}),
        "unknown arm": first.model_copy(update={"arm": "third"}),
        "unknown task": first.model_copy(update={"request": first.request.model_copy(update={"task": "x"})}),
    }[change]
    with pytest.raises(ValueError, match="twice" if change == "twice" else "none of this|tasks here"):
        judge_samples([*given, strange], [task], JudgeSettings({"aime25": 0.02}))


def test_a_lost_partner_makes_the_eval_invalid() -> None:
    task = load_task("aime25", items=3)
    result = judge_samples(samples([task], 1, right)[:-1], [task], JudgeSettings({"aime25": 0.9}))
    assert "no partner" in result.tasks["aime25"].invalid[0]
    assert result.outcome is Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("name", "answer", "chance"),
    [("aime25", "\\boxed{1000}", 0), ("mrcr", "an otter", 0), ("gpqa_diamond", "Answer: A", 25)],
)
def test_a_baseline_that_has_nothing_to_lose_decides_nothing(name: str, answer: str, chance: int) -> None:
    """Both arms wrong alike, or both guessing: no damage is seen because none could be."""
    result = judged(lambda arm, request, text: right(arm, request, answer), (name,))
    assert result.outcome is Outcome.UNDECIDED
    assert f"guessing gives {chance}%: who lost all between them" in result.tasks[name].invalid[0]
    assert not result.tasks[name].means


def test_a_baseline_must_have_more_than_the_margin_to_lose() -> None:
    def few(share: float) -> Outcome:
        def answer(arm: str, request: Request, text: str) -> Response:
            good = int(request.item.split("-")[1]) < 30 * share
            return right(arm, request, text if good else "\\boxed{1000}")

        return judged(answer, repeats=8, margin=0.1).outcome

    assert (few(0.1), few(0.2)) == (Outcome.UNDECIDED, Outcome.GO)


def test_a_candidate_that_does_worse_than_a_guesser_is_no_go_against_a_baseline_that_guesses() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        return right(arm, request, "Answer: A" if arm == "baseline" or text != "Answer: A" else "Answer: B")

    assert judged(answer, ("gpqa_diamond",)).outcome is Outcome.NO_GO


def test_questions_of_the_plan_that_both_arms_lack_are_missed() -> None:
    task = load_task("aime25", items=30)
    given = samples([task], 8, right)
    plan = [s.request for s in given if s.arm == "baseline"]
    settings = JudgeSettings({"aime25": 0.2})
    assert judge_samples(given, [task], settings, plan).outcome is Outcome.GO
    some = [s for s in given if s.request.repeat < 7]
    assert judge_samples(some, [task], settings).outcome is Outcome.GO
    lacking = judge_samples(some, [task], settings, plan)
    assert lacking.outcome is Outcome.UNDECIDED
    assert "30 of 240 questions have no answer in either arm" in lacking.tasks["aime25"].invalid[0]
    other = judge_samples(given, [task], settings, [r.model_copy(update={"seed": 5}) for r in plan])
    assert "240 answers are to no question of this plan" in other.tasks["aime25"].invalid[0]


def test_a_task_without_samples_is_undecided() -> None:
    task = load_task("aime25", items=3)
    result = judge_samples([], [task], JudgeSettings({"aime25": 0.02}))
    assert result.tasks["aime25"].invalid == ["no question was answered by both arms"]
    assert result.outcome is Outcome.UNDECIDED
