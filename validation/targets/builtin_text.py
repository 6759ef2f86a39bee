"""Answering on decode_impl's engine, with an ear at its sampler and an eye on its states."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from decode_impl.engine import Engine
from decode_impl.request import Request
from decode_impl.runner import ModelRunner
from decode_impl.sampling import SamplingParams
from validation.targets.text import Answer, Ask, VerifyStep

NORM_EVERY = 64
"""Least places between two readings of a request's state."""


def answer(runner: ModelRunner, asks: Sequence[Ask]) -> list[Answer]:
    """Answer all asks on an engine over `runner`, which nobody else uses meanwhile."""
    return _Listener(runner, asks).answers()


class _Listener:
    def __init__(self, runner: ModelRunner, asks: Sequence[Ask]) -> None:
        self._runner, self._asks = runner, asks
        self._entropies: dict[int, dict[int, float]] = defaultdict(dict)
        self._norms: dict[str, dict[int, float]] = defaultdict(dict)
        self._first: dict[tuple[int, ...], int] = {}
        for i, ask in enumerate(asks):
            self._first.setdefault(ask.prompt, i)
        self._held_back: dict[int, None] = {}
        self._sample = runner.parts["sample"]
        runner.parts = {**runner.parts, "sample": self._listen}
        self._engine: Engine = runner.parts["engine"](runner)

    def answers(self) -> list[Answer]:
        try:
            self._add(range(len(self._asks)))
            while self._engine.step() is not None or self._held_back:
                self._read_states()
                self._add(tuple(self._held_back))
        finally:
            # Cached prefixes own pages; those of an engine that is gone would be lost to the next one.
            while self._engine.prefixes.evict_oldest():
                pass
            self._runner.parts = {**self._runner.parts, "sample": self._sample}
        return [self._answer(i, ask) for i, ask in enumerate(self._asks)]

    def _add(self, indices: Iterable[int]) -> None:
        """Give the engine its asks. One that repeats the prompt of another waits until that has been run, so that it
        finds it among the cached prefixes."""
        for i in indices:
            ask = self._asks[i]
            first = self._first[ask.prompt]
            if i != first and not (self._engine.request(str(first)).output or self._ended(first)):
                self._held_back.setdefault(i)
                continue
            self._held_back.pop(i, None)
            # Greedy requests draw nothing: the seed only tells the listener whose row it hears.
            sampling = SamplingParams(ask.temperature, ask.top_p, ask.seed)
            self._engine.add(str(i), ask.prompt, ask.max_tokens, sampling, ask.stop_tokens)

    def _ended(self, index: int) -> bool:
        return self._engine.request(str(index)).finish is not None

    def _listen(self, logits: Tensor, params: SamplingParams, position: int) -> Any:
        logs = logits.double().log_softmax(-1)
        self._entropies[params.seed][position] = float(-(logs.exp() * logs).nansum())
        return self._sample(logits, params, position)

    def _read_states(self) -> None:
        for i in range(len(self._asks)):
            if i in self._held_back:
                continue
            request = self._engine.request(str(i))
            norms = self._norms[request.id]
            if request.running and request.output and request.computed - max(norms, default=-NORM_EVERY) >= NORM_EVERY:
                slot = request.slot + request.column
                squares = [pool[slot].double().square().sum() for pool in self._runner.states.state.values()]
                norms[request.computed] = float(torch.stack(squares).sum().sqrt())

    def _answer(self, index: int, ask: Ask) -> Answer:
        request = self._engine.request(str(index))
        first, heard = len(ask.prompt), self._entropies[ask.seed]
        return Answer(
            tokens=tuple(request.output),
            finish=str(request.finish),
            error=request.error,
            entropies=tuple(heard.get(first + i, float("nan")) for i in range(len(request.output))),
            verify_steps=[VerifyStep(*step) for step in request.verify_steps],
            state_norms=dict(self._norms[request.id]),
            used=_used(request),
        )


def _used(request: Request) -> dict[str, int | float | str]:
    """What the engine answered with, read from its own request and not from what was asked."""
    return {
        "seed": request.sampling.seed,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "max_tokens": request.max_tokens,
        "prompt_tokens": len(request.prompt),
        "prompt_sha256": sha256(json.dumps(list(request.prompt)).encode()).hexdigest(),
    }
