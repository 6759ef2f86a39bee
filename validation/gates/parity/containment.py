"""One NaN stays with its request: planted into a candidate's own engine, it must end that request and nothing else.

A healthy model makes no NaN, so what an engine does with one shows only where one is put: into the state of one
request, whose answer must end in an error and nobody else's, nor a later one's that asks the same prompt and would find
its cached prefix; and into the drafter's input for one request, which must do without drafts while every text is
finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from validation.errors import describe
from validation.faults.base import ENGINE, Fault, Ops
from validation.gates.base import Context
from validation.gates.parity.measure import windows
from validation.targets.base import ArmConfig, TargetError
from validation.targets.text import Answer, Ask

UNIT = "containment"
"""The unit's id."""

REQUESTS, PROMPT, TOKENS, DRAFTS = 3, 12, 8, 3

BLOCK = 64
"""Tokens of a prefix block: a prompt of one more leaves a cached prefix."""
SICK_STATE, SICK_DRAFTER = 1, 0
"""The request that gets the NaN: the second to be given a slot, the first that the drafter sees."""


def measure_containment(context: Context) -> dict[str, Any]:
    """Plain JSON: what went beyond the request that had the NaN, or did not show there."""
    prompts = windows(context.target, REQUESTS, PROMPT, context.seed)
    asks = [Ask(tuple(prompt), TOKENS, context.seed * 1000 + i) for i, prompt in enumerate(prompts)]
    drafts = _can_draft(context)
    findings = [*_in_state(context, asks), *_in_prefix(context), *(_in_drafter(context, asks) if drafts else ())]
    return {"cases": 2 + drafts, "steps": 0, "findings": findings}


def _in_state(context: Context, asks: Sequence[Ask]) -> Iterator[str]:
    answers = _answers(context, asks, 0, Fault("nan-in-state", "", "state_cache", (), (ENGINE,), _sick_state))
    if isinstance(answers, str):
        yield f"NaN in the state of one request: the engine raised {answers}"
        return
    for i, answer in enumerate(answers):
        if i == SICK_STATE and answer.finish != "error":
            yield f"a request whose state holds NaN ended by {answer.finish!r} and not in an error"
        elif i != SICK_STATE and answer.finish == "error":
            yield f"NaN in the state of request {SICK_STATE} ended request {i}: {answer.error}"


def _in_prefix(context: Context) -> Iterator[str]:
    """The sick request's prompt is asked again once it has run: whatever its prefix left in the cache is found."""
    sick, other = windows(context.target, 2, BLOCK + 1, context.seed)
    asks = [Ask(tuple(prompt), TOKENS, context.seed * 1000 + i) for i, prompt in enumerate((other, sick, sick))]
    answers = _answers(context, asks, 0, Fault("nan-in-state", "", "state_cache", (), (ENGINE,), _sick_state))
    if isinstance(answers, str):
        yield f"NaN in the state of a request whose prompt is asked again: the engine raised {answers}"
        return
    for i, answer in enumerate(answers):
        if i != SICK_STATE and answer.finish == "error":
            yield f"NaN in the state of a request that fills a prefix block ended request {i}: {answer.error}"


def _in_drafter(context: Context, asks: Sequence[Ask]) -> Iterator[str]:
    answers = _answers(context, asks, DRAFTS, Fault("nan-in-drafter", "", "drafter", (), (ENGINE,), _sick_drafter))
    if isinstance(answers, str):
        yield f"NaN in the drafter's input of one request: the engine raised {answers}"
        return
    for i, answer in enumerate(answers):
        if answer.finish == "error":
            yield f"NaN in the drafter's input of request {SICK_DRAFTER} ended request {i}: {answer.error}"
    if any(step.drafts for step in answers[SICK_DRAFTER].verify_steps):
        yield f"request {SICK_DRAFTER} was given drafts out of logits that are NaN"


def _answers(context: Context, asks: Sequence[Ask], drafts: int, sick: Fault) -> list[Answer] | str:
    """The candidate's answers, or what its engine raised."""
    arm = context.target.open(_config(context, drafts, sick))
    try:
        return arm.answer(asks)
    except TargetError:
        raise
    except Exception as error:  # an engine that one NaN brings down is what is looked for
        return describe(error)


def _config(context: Context, drafts: int, *sick: Fault) -> ArmConfig:
    return replace(
        context.candidate,
        kv_cache_dtype="fp8",
        tensor_parallel=1,
        context_parallel=1,
        max_batch=REQUESTS,
        max_context=BLOCK + 1 + TOKENS + DRAFTS,
        drafts=drafts,
        faults=(*context.candidate.faults, *sick),
    )


def _can_draft(context: Context) -> bool:
    """Whether this target's model has a drafter; the unit has one case less without."""
    try:
        context.target.open(_config(context, DRAFTS))
    except TargetError:
        return False
    return True


def _sick_state(parts: Ops) -> Ops:
    return {"state_cache": _with_nan_in_one_slot(parts["state_cache"])}


def _with_nan_in_one_slot(right: Any) -> Any:
    class Sick(right):  # type: ignore[misc]
        given = 0

        def allocate(self) -> int:
            slot = int(super().allocate())
            if self.given == SICK_STATE:
                next(iter(self.state.values()))[slot, ..., 0, 0] = torch.nan
            self.given += 1
            return slot

    return Sick


def _sick_drafter(parts: Ops) -> Ops:
    return {"drafter": _with_nan_in_its_first_rows(parts["drafter"])}


def _with_nan_in_its_first_rows(right: Any) -> Any:
    class Sick(right):  # type: ignore[misc]
        seen = False

        def observe(self, taps: Any, positions: Any, indices: Any) -> None:
            if not self.seen:
                # The first rows are the first request's prompt.
                taps = [torch.full_like(tap, torch.nan) for tap in taps]
            self.seen = True
            super().observe(taps, positions, indices)

    return Sick
