"""Faults between a request and its answer: what a server does besides decoding, and does differently in one arm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("answers", gate="evals", kind=Kind.ACCOUNTING)

ENGINE = partial(LAYER.engine, "engine", gate="evals")

_CAP = 24
"""Tokens; fewer than a worked answer takes."""

_FIRST_CONTROL = 256
"""Ids of a byte-level vocabulary from which on a token is control and not text."""


@ENGINE(
    "eval-budget-spent",
    "answers are cut at a cap below the one asked for, and would count as wrong",
    sources="M133",
    missed_by="accuracy, which falls for a reason that is none of the model's",
)
def _capped(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def add(self, request_id: str, prompt: Any, max_tokens: int, *rest: Any) -> None:
            super().add(request_id, prompt, min(max_tokens, _CAP), *rest)

    return Faulty


@ENGINE(
    "eval-stop-in-reasoning",
    "a stop string matches inside the reasoning, at the first equals sign",
    sources="M135",
    missed_by="accuracy; the finish reason, which is an honest stop",
)
def _stopped(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def add(self, request_id: str, prompt: Any, max_tokens: int, sampling: Any, stop_tokens: Any = ()) -> None:
            super().add(request_id, prompt, max_tokens, sampling, (*stop_tokens, ord("=")))

    return Faulty


@ENGINE(
    "eval-template-dropped",
    "the chat template is not applied: the prompt lacks its control tokens",
    sources="M136",
    missed_by="accuracy, which falls a little",
)
def _bare(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def add(self, request_id: str, prompt: Any, *rest: Any) -> None:
            super().add(request_id, [token for token in prompt if token < _FIRST_CONTROL] or prompt, *rest)

    return Faulty


@ENGINE(
    "eval-error-is-answer",
    "every third request fails and comes back as an empty answer that stopped by itself",
    sources="M137",
    missed_by="accuracy; error counters",
)
def _swallowed(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def request(self, request_id: str) -> Any:
            found = super().request(request_id)
            if found.finish is not None and request_id.isdigit() and int(request_id) % 3 == 0:
                found.output.clear()
            return found

    return Faulty


@ENGINE(
    "eval-answers-swapped",
    "neighbouring requests of a batch get each other's answers",
    kind=Kind.INDEX,
    sources="kind of M88",
    missed_by="logits and kernels, which are right; fluent, well-formed answers",
)
def _swapped(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def request(self, request_id: str) -> Any:
            found = super().request(request_id)
            neighbour = self._requests.get(str(int(request_id) ^ 1)) if request_id.isdigit() else None
            if neighbour is None or self.unfinished:
                return found
            return replace(found, output=neighbour.output)

    return Faulty
