"""Faults of what runs when: the decision where a step goes, and the scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("scheduling", kind=Kind.SCHEDULE)


@LAYER.engine(
    "plan",
    "plan-one-token-prompt-decodes",
    "a one-token prompt runs as a decode step",
    kind=Kind.SCHEDULE,
    sources="M88",
    missed_by="prompts of more than one token",
    equivalent="a cleared slot is the state of no tokens, so the decode step computes the same; the plan keeps such "
    "steps generic because a captured graph holds the last step's indices (fault batch-one-token-prefill-stale)",
)
def _plan(right: Any) -> Any:
    def faulty(chunks: Any, *args: Any, **options: Any) -> Any:
        single = bool(chunks) and all(len(chunk.tokens) == 1 for chunk in chunks)
        moved = [replace(chunk, start=max(chunk.start, 1)) for chunk in chunks] if single else chunks
        return right(moved, *args, **options)

    return faulty


@LAYER.engine(
    "engine",
    "engine-resume-without-recompute",
    "a preempted request goes on where it was, on an empty slot",
    kind=Kind.SCHEDULE,
    sources="M63, M72",
    missed_by="pools that never run low",
)
def _resume(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def _preempt(self, request: Any) -> None:
            computed = request.computed
            super()._preempt(request)
            request.computed = computed

    return Faulty


@LAYER.engine(
    "engine",
    "engine-token-computed-twice",
    "a neighbour's token is computed again when a request ends",
    kind=Kind.SCHEDULE,
    sources="M73",
    missed_by="requests that end together",
)
def _again(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def _end(self, request: Any, finish: Any) -> None:
            super()._end(request, finish)
            for other in self._running[:1]:
                other.computed -= other.computed > len(other.prompt)

    return Faulty
