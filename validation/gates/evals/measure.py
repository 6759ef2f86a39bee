"""Asking both arms the same questions: same prompts, same seeds, and in the order A B B A."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals.samples import BASELINE, CANDIDATE, Request, Response, Sample
from validation.gates.base import Context
from validation.targets.base import Arm, ArmConfig, Capability, Target
from validation.targets.text import Answer, Ask


def ask_both(
    context: Context, requests: Sequence[Request], configs: tuple[ArmConfig, ArmConfig], batch: int, first: int
) -> dict[str, Any]:
    """Samples of both arms, and which of the candidate's steps ran on its own path; plain JSON.

    `first` is the place of the first request in its eval's plan: every other batch is asked of the candidate first.
    """
    target = context.target
    baseline, candidate = (target.open(config) for config in configs)
    before = candidate.counters()
    if Capability.CONVERSE in target.capabilities:
        samples = list(target.samples(requests, configs))  # type: ignore[attr-defined]
    else:
        samples = []
        for start in range(0, len(requests), batch):
            block = requests[start : start + batch]
            order = [(BASELINE, baseline), (CANDIDATE, candidate)]
            for name, arm in order if (first + start) // batch % 2 == 0 else reversed(order):
                samples += _asked(target, arm, name, block)
    after = candidate.counters()
    return {
        "samples": [sample.model_dump(mode="json") for sample in samples],
        "paths": {path: n - before.steps.get(path, 0) for path, n in after.steps.items()},
        "fallbacks": {why: n - before.fallbacks.get(why, 0) for why, n in after.fallbacks.items()},
    }


def prompt_of(target: Target, request: Request) -> tuple[int, ...]:
    """Tokens of a request's chat, up to where the answer begins."""
    return tuple(target.chat([message.model_dump() for message in request.messages]))


def _asked(target: Target, arm: Arm, name: str, requests: Sequence[Request]) -> list[Sample]:
    stop = tuple(target.stop_tokens())
    asks = [
        Ask(
            prompt=prompt_of(target, request),
            max_tokens=request.max_tokens,
            seed=request.seed,
            temperature=request.temperature,
            top_p=request.top_p,
            stop_tokens=stop,
        )
        for request in requests
    ]
    return [
        Sample(arm=name, request=request, response=_response(target, answer))
        for request, answer in zip(requests, arm.answer(asks), strict=True)
    ]


def _response(target: Target, answer: Answer) -> Response:
    steps = answer.verify_steps
    return Response(
        text=target.text(answer.tokens),
        finish_reason=answer.finish,
        tokens=len(answer.tokens),
        error=(answer.error or "no reason was given") if answer.finish == "error" else "",
        effective=dict(answer.used),
        drafts_accepted=sum(step.accepted for step in steps) / len(steps) if steps else None,
    )
