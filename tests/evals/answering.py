"""Samples of two arms that answer as told, and what the judge makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evals.judge import Judgement, JudgeSettings, judge_samples
from evals.samples import ARMS, Request, Response, Sample, plan_requests
from evals.tasks import EvalTask, load_task

Answering = Callable[[str, Request, str], Response]
"""Arm, request and the right answer's text -> what that arm says."""


def right(arm: str, request: Request, text: str) -> Response:
    """An answer that took another length of thought at every repeat, as drawn ones do."""
    return Response(text=text, finish_reason="stop", tokens=len(text) + request.repeat)


def samples(tasks: Sequence[EvalTask], repeats: int, answer: Answering) -> list[Sample]:
    """Both arms' samples, the answers as told."""
    wrap = {"aime25": "so \\boxed{{{}}}", "gpqa_diamond": "Answer: {}", "mrcr": "{}"}
    by_name = {task.name: task for task in tasks}
    return [
        Sample(
            arm=arm, request=r, response=answer(arm, r, wrap[r.task].format(by_name[r.task].expected(r.item, r.repeat)))
        )
        for r in plan_requests(tasks, repeats, seed=3)
        for arm in ARMS
    ]


def judged(answer: Answering, names: Sequence[str] = ("aime25",), repeats: int = 8, margin: float = 0.02) -> Judgement:
    tasks = [load_task(name, items=30) for name in names]
    settings = JudgeSettings(dict.fromkeys(names, margin))
    return judge_samples(samples(tasks, repeats, answer), tasks, settings)


def worse(share: float, seed: int = 0, equally: bool = False) -> Answering:
    """Wrong in this share of the candidate's answers (or of both arms')."""
    rng = np.random.default_rng(seed)

    def answer(arm: str, request: Request, text: str) -> Response:
        wrong = rng.random() < share and (equally or arm == "candidate")
        return right(arm, request, "\\boxed{1000}" if wrong else text)

    return answer
