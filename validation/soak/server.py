"""A soak of a server: canaries asked again between other load, compared by all that the server tells of an answer.

A server may answer a prompt in two ways that are both right: cold, and from its prefix cache, whose steps have other
shapes. So a canary is asked three times before any load: the first two answers are its references, the third shows
whether the server repeats itself at all. What it does not repeat without load is not compared, and the statement says
so; a greedy text that it does not repeat is a finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from evals.runner.client import Client, EndpointDown
from evals.runner.endpoint import Endpoint, EndpointError, Limits
from evals.samples import Message, Request
from evals.text import load
from validation.errors import one_line
from validation.soak.heard import Heard, difference, heard_of, log_difference
from validation.soak.soak import CANARIES, MOST_LOAD, TOKENS, Soaked
from validation.targets.base import TargetError
from validation.targets.openai_evidence import Evidence, gather
from validation.targets.openai_forced import HOW_TO_FORCE, can_be_forced, forced_logits, tokens_of

LIKELIEST = 5
"""Tokens beside each whose log-probability is asked for: what every server that gives any gives."""

_LOGS = {"chat": {"logprobs": True, "top_logprobs": LIKELIEST}, "completions": {"logprobs": LIKELIEST}}

_PROMPT, _LONGEST_PROMPT, _LONGEST_ANSWER = 200, 400, 48
_FORCED_PROMPT, _FORCED_TOKENS = 16, 32


@dataclass
class Canary:
    """A question with its references; `bits` where its log-probabilities are compared too."""

    name: str
    ask: Callable[[], Heard]
    greedy: bool
    references: list[Heard] = field(default_factory=list)
    bits: bool = True


class Server:
    """A server that is soaked.

    Raises:
        EndpointDown: it cannot be reached.
        EndpointError: it does not list the model that is to be asked.
    """

    def __init__(self, endpoint: Endpoint, seed: int, limits: Limits | None = None) -> None:
        self._endpoint, self._limits, self._seed = endpoint, limits or Limits(), seed
        self.evidence = self._gather()
        self._model = self.evidence.identity["model"]
        self._text = "\n".join(document.text for document in load("heldout"))
        self._places = np.random.default_rng(seed)
        self._number = 0
        self._loud = {**endpoint.extra, **_LOGS[endpoint.api]}
        self._gives_logs = True
        self.compared: list[str] = []
        self.unsteady: list[str] = []

    def canaries(self) -> list[Canary]:
        """The canaries that this server can be asked, each with two references; says what is compared."""
        questions = [self._question(_PROMPT, TOKENS, 0.0 if i % 2 == 0 else 0.8) for i in range(CANARIES)]
        first = self._asked([questions[0]])[0]
        if first.error and not self._asked([questions[0]], loud=False)[0].error:
            self._gives_logs = False
        asked = [
            Canary(f"canary {i}", lambda q=q: self._asked([q])[0], q.temperature == 0)  # type: ignore[misc]
            for i, q in enumerate(questions)
        ]
        forced = self._forced()
        canaries = [canary for canary in (*asked, *forced) if self._prepared(canary)]
        self.compared.insert(0, "compared: text and how it ended")
        logs = any(canary.bits and canary.references[0].logs for canary in canaries if canary in asked)
        self.compared.append(
            f"log-probabilities of its tokens and of the {LIKELIEST} likeliest, bit for bit"
            if logs
            else "no log-probabilities (the server gives none, or does not repeat them without load)"
        )
        self.compared.append(
            f"log-probabilities of the whole vocabulary along {_FORCED_TOKENS} given tokens, bit for bit"
            if any(canary.bits for canary in canaries if canary in forced)
            else f"no logits (a vLLM server gives them if you {HOW_TO_FORCE})"
        )
        return canaries

    def load(self) -> list[Heard]:
        """Answers to other questions, all sent together: other prompts, lengths and numbers every time."""
        count = int(self._places.integers(1, MOST_LOAD + 1))
        return self._asked(
            [
                self._question(
                    int(self._places.integers(1, _LONGEST_PROMPT)),
                    int(self._places.integers(1, _LONGEST_ANSWER)),
                    float(self._places.choice([0, 1])),
                )
                for _ in range(count)
            ],
            loud=False,
        )

    def changed(self) -> str:
        """What the server is now that it was not; empty where it is still the same."""
        return self._gather().changed_from(self.evidence)

    def _prepared(self, canary: Canary) -> bool:
        """Ask a canary before any load. False where it cannot be compared, which the statement then says."""
        first, second, third = (canary.ask() for _ in range(3))
        if first.error:
            raise EndpointError(f"{self._endpoint.base} does not answer {canary.name}: {one_line(first.error)}")
        canary.references = [first, second]
        message = difference(canary.references, third, bits=False)
        if message and not canary.greedy:
            self.compared.append(f"{canary.name} is left out (sampled, and the server does not repeat it by its seed)")
            return False
        if message:
            self.unsteady.append(f"{canary.name} before any load: {message}")
        elif difference(canary.references, third, bits=True):
            canary.bits = False
            apart = log_difference(second, third)
            self.compared.append(
                f"{canary.name} by its text alone (without load too, {apart} of its log-probabilities)"
            )
        return True

    def _question(self, characters: int, tokens: int, temperature: float) -> Request:
        start = int(self._places.integers(len(self._text) - characters))
        self._number += 1
        return Request(
            task="soak",
            item=str(self._number),
            repeat=0,
            messages=(Message(role="user", content=self._text[start : start + characters]),),
            seed=self._seed * 2**20 + self._number,
            temperature=temperature,
            top_p=1.0,
            max_tokens=tokens,
        )

    def _asked(self, questions: Sequence[Request], loud: bool = True) -> list[Heard]:
        endpoint = self._endpoint
        extra = self._loud if loud and self._gives_logs else endpoint.extra
        asked = Endpoint(endpoint.url, self._model, endpoint.api, endpoint.key_variable, extra)

        async def run() -> list[Heard]:
            async with Client(asked, self._limits) as client:
                return [heard_of(one) for one in await asyncio.gather(*map(client.ask, questions))]

        return asyncio.run(run())

    def _forced(self) -> list[Canary]:
        """One canary of given tokens, where the server follows them and tells its whole vocabulary."""
        if not self.evidence.is_vllm or not can_be_forced(self._endpoint, self._model, self._limits):
            return []
        tokens = tokens_of(self._endpoint, self._model, self._limits, self._text[:_LONGEST_PROMPT])
        sequence = tokens[: _FORCED_PROMPT + _FORCED_TOKENS]

        def ask() -> Heard:
            try:
                logits = forced_logits(self._endpoint, self._model, self._limits, [sequence], _FORCED_PROMPT)
            except TargetError as error:
                return Heard(error=str(error))
            return Heard(logs=_flat(logits))

        return [Canary("the given tokens", ask, greedy=True)]

    def _gather(self) -> Evidence:
        async def run() -> Evidence:
            async with Client(self._endpoint, self._limits) as client:
                return await gather(client, "", "")

        return asyncio.run(run())


def _flat(logits: Tensor) -> tuple[float, ...]:
    return tuple(logits.flatten().tolist())


def soak_server(server: Server, go_on: Callable[[], bool], most_changes: int = 10) -> Soaked:
    """Load and canaries in turn, canaries one at a time, until `go_on` says no or `most_changes` have changed.

    Raises:
        EndpointError: a canary gets no answer before any load.
        EndpointDown: the server went away for good before any load.
    """
    canaries = server.canaries()
    seen = Soaked(statement="; ".join(server.compared), changed=list(server.unsteady))
    try:
        while go_on() and len(seen.changed) < most_changes:
            answers = server.load()
            again = [canary.ask() for canary in canaries]
            seen.rounds, seen.answered = seen.rounds + 1, seen.answered + len(answers)
            seen.compared += len(canaries)
            seen.errors += sum(bool(one.error) for one in (*answers, *again))
            seen.changed += _changed(canaries, again, seen.rounds)
        if became := server.changed():
            seen.changed.append(f"the server is no longer what it was: {became}")
    except (EndpointDown, EndpointError) as error:
        seen.changed.append(one_line(error))
    return seen


def _changed(canaries: Sequence[Canary], again: Sequence[Heard], number: int) -> Iterator[str]:
    for canary, one in zip(canaries, again, strict=True):
        if message := difference(canary.references, one, canary.bits):
            yield f"{canary.name} in round {number}: {message}"
