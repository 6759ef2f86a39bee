"""Repeats that are one answer count once, whoever made them so: a bound rests on as many answers as there are."""

from __future__ import annotations

import numpy as np
import pytest
from answering import judged, right

from evals.draws import repeating, unlike
from evals.judge import TaskJudgement
from evals.samples import Request, Response
from evals.statistics import Outcome

ITEMS = 30


def greedy(arm: str, request: Request, text: str) -> Response:
    """A server that ignores temperature and seed, and says nothing of them."""
    return Response(text=text, finish_reason="stop", tokens=len(text))


def sure(arm: str, request: Request, text: str) -> Response:
    """A server that draws the same at every repeat, and says how it drew."""
    said = {"temperature": request.temperature, "seed": request.seed}
    return Response(text=text, finish_reason="stop", tokens=len(text), effective=said)


def drawing(arm: str, request: Request, text: str) -> Response:
    """A greedy candidate beside a baseline that draws."""
    return greedy(arm, request, text) if arm == "candidate" else right(arm, request, text)


def item(request: Request) -> int:
    return int(request.item.split("-")[1])


def test_repeats_of_a_silently_greedy_server_count_once() -> None:
    task = judged(greedy).tasks["aime25"]
    assert task.repeating == ["baseline", "candidate"]
    assert task.decision is not None
    assert task.decision.upper == pytest.approx(np.log(20) / ITEMS)
    assert task.outcome is Outcome.UNDECIDED
    assert task.design is not None
    assert task.design.repeats_needed is None, "more of the same answers decide nothing"


def test_a_server_that_says_how_it_drew_is_believed() -> None:
    task = judged(sure).tasks["aime25"]
    assert not task.repeating
    assert task.outcome is Outcome.GO


def test_reasoning_that_is_not_in_the_text_is_seen_by_its_length() -> None:
    task = judged(right).tasks["aime25"]
    assert len({pair.baseline.response.text for pair in task.pairs}) <= ITEMS
    assert not task.repeating


def test_a_question_in_other_words_is_another_question() -> None:
    """Choices in another order at every repeat: only those in one order can be one answer."""
    task = judged(greedy, ("gpqa_diamond",)).tasks["gpqa_diamond"]
    assert task.repeating == ["baseline", "candidate"]
    assert any(len({p.baseline.response.text for p in task.pairs if item(p.request) == i}) > 1 for i in range(ITEMS))


@pytest.mark.parametrize(("parted", "repeats_itself"), [(1, True), (3, False)])
def test_nearly_all_questions_are_enough(parted: int, repeats_itself: bool) -> None:
    """Greedy answers may part where a server batches them otherwise."""
    result = judged(lambda arm, r, text: (right if item(r) < parted else greedy)(arm, r, text))
    assert bool(result.tasks["aime25"].repeating) == repeats_itself


def test_an_arm_that_repeats_itself_beside_one_that_draws_decides_nothing() -> None:
    result = judged(drawing)
    assert result.outcome is Outcome.UNDECIDED
    assert result.tasks["aime25"].invalid == [
        "candidate: all repeats of 30 of 30 questions are one answer, in the baseline of 0: the arms did not draw "
        "alike; see whether its server ignores temperature or seed"
    ]


def test_a_candidate_that_says_one_wrong_thing_again_and_again_is_no_go() -> None:
    result = judged(lambda arm, r, text: drawing(arm, r, text if arm == "baseline" else "\\boxed{1000}"))
    assert result.outcome is Outcome.NO_GO


def test_who_was_asked_once_repeats_nothing() -> None:
    task: TaskJudgement = judged(greedy, repeats=1).tasks["aime25"]
    assert not task.repeating
    assert not list(unlike(task.pairs))
    assert not repeating([])
