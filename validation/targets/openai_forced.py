"""Teacher-forced decode on vLLM servers that were started for it, over the completions API.

    PYTHONPATH=DECODEGATE vllm serve MODEL --max-logprobs -1 \\
        --logits-processors validation.targets.vllm_forcing:Forced

The server's processor draws the given tokens; log-probabilities of the whole vocabulary come back with every step.
Requests of a batch are sent together; how the server's scheduler batches their steps is its own affair.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import torch
from torch import Tensor

from evals.runner.client import Client, TooLarge
from evals.runner.endpoint import Endpoint, Limits
from validation.errors import one_line
from validation.targets.base import ForcedStep, TargetError

FORCED = "decodegate_forced"
PROBE = ([1, 2, 3, 4], 2)
"""A decode that only a server which can be forced gets right: it would hardly draw 4 after 3, after 1 and 2."""

HOW_TO_FORCE = "start it with --max-logprobs -1 --logits-processors validation.targets.vllm_forcing:Forced"
PIECE = 1000
"""Characters tokenized at once: as many tokens at most as bytes, below any model's context."""

_PREFIX = "token_id:"


class OpenAIForcedDecode:
    """A decode that has been done. `logits` f32 [steps, n, V]: log-probabilities, so logits up to a constant a row."""

    def __init__(self, logits: Tensor, path: str, prompt_length: int) -> None:
        self.logits, self._path, self._first = logits, path, prompt_length

    def __iter__(self) -> Iterator[ForcedStep]:
        for i, rows in enumerate(self.logits):
            count = len(rows)
            yield ForcedStep(rows, tuple(range(count)), (self._first + i,) * count, self._path)

    def state(self, sequence: int) -> dict[str, Tensor]:
        """Not possible here."""
        raise TargetError("a server's caches are not read")

    def close(self) -> None:
        """Nothing is held."""


def forced_logits(
    endpoint: Endpoint, model: str, limits: Limits, sequences: Sequence[Sequence[int]], prompt_length: int
) -> Tensor:
    """Log-probabilities f32 [steps, n, V] of the decode steps of all sequences, sent together.

    Raises:
        TargetError: the server did not follow the tokens, or does not tell the whole vocabulary.
    """

    async def run() -> list[list[dict[str, float]]]:
        async with Client(endpoint, limits) as client:
            return await asyncio.gather(*(_one(client, model, list(s), prompt_length) for s in sequences))

    told = asyncio.run(run())
    vocab = len(told[0][0])
    rows = [[_row(step, vocab) for step in steps] for steps in told]
    # The first step is the prefill's last row; decode starts behind it.
    return torch.tensor(rows).transpose(0, 1)[1:].contiguous()


def tokens_of(endpoint: Endpoint, model: str, limits: Limits, text: str) -> list[int]:
    """Token ids of a text, by vLLM's own call for that; pieces are tokenized apart.

    Raises:
        TargetError: the server has no such call.
    """

    async def run() -> list[int]:
        ids: list[int] = []
        async with Client(endpoint, limits) as client:
            for start in range(0, len(text), PIECE):
                body = {"model": model, "prompt": text[start : start + PIECE], "add_special_tokens": False}
                status, reply = await client.post(f"{endpoint.root}/tokenize", json.dumps(body).encode())
                if status != 200:
                    raise TargetError(f"{endpoint.root}/tokenize answers HTTP {status}")
                ids += json.loads(reply)["tokens"]
        return ids

    try:
        return asyncio.run(run())
    except (httpx.RequestError, TimeoutError, TooLarge, ValueError, LookupError, TypeError) as error:
        raise TargetError(f"{endpoint.root}/tokenize gives no tokens ({one_line(error)})") from None


def can_be_forced(endpoint: Endpoint, model: str, limits: Limits) -> bool:
    """Whether this server follows given tokens and tells log-probabilities of its whole vocabulary."""
    try:
        forced_logits(endpoint, model, limits, [PROBE[0]], PROBE[1])
    except TargetError:
        return False
    return True


async def _one(client: Client, model: str, tokens: list[int], prompt_length: int) -> list[dict[str, float]]:
    # The last decode step's own token is of no interest.
    wanted = [*tokens[prompt_length:], 0]
    body = {
        "model": model,
        "prompt": tokens[:prompt_length],
        "max_tokens": len(wanted),
        "temperature": 0,
        "logprobs": -1,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {FORCED: wanted},
    }
    try:
        status, reply = await client.post(f"{client.endpoint.base}/completions", json.dumps(body).encode())
        if status != 200:
            raise TargetError(
                f"{client.endpoint.base}: HTTP {status}: {one_line(reply[:300].decode('utf-8', 'replace'))}"
            )
        told: dict[str, Any] = json.loads(reply)["choices"][0]["logprobs"]
        followed, steps = [str(token) for token in told["tokens"]], list(told["top_logprobs"])
    except (httpx.RequestError, TimeoutError, TooLarge) as error:
        raise TargetError(f"{client.endpoint.base}: forced decode got no answer ({type(error).__name__})") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise TargetError(
            f"{client.endpoint.base}: forced decode got no log-probabilities ({one_line(error)})"
        ) from None
    if followed != [f"{_PREFIX}{token}" for token in wanted]:
        raise TargetError(f"{client.endpoint.base}: the server left the given tokens; {HOW_TO_FORCE}")
    if len(steps) != len(wanted) or not all(isinstance(step, dict) and step for step in steps):
        raise TargetError(f"{client.endpoint.base}: not every step tells its log-probabilities; {HOW_TO_FORCE}")
    return steps


def _row(step: Any, vocab: int) -> list[float]:
    names = [f"{_PREFIX}{token}" for token in range(vocab)]
    if not isinstance(step, dict) or len(step) != vocab or any(not isinstance(step.get(n), int | float) for n in names):
        raise TargetError(f"a step does not tell the whole vocabulary; {HOW_TO_FORCE}")
    return [float(step[name]) for name in names]
