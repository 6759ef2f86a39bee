"""What is read out of a vLLM engine: forced-decode and prefill logits over the whole vocabulary, and greedy answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm_reference.cases import Question
from benchmarks.vllm_reference.engine import MAX_REQUESTS, MAX_STEP_TOKENS
from benchmarks.vllm_reference.outputs import Answer


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Full-vocabulary log-probabilities are a million small objects, which the cycle collector would visit again and
    again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _generate(llm: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
    tokens = sum(map(len, prompts))
    if tokens > MAX_STEP_TOKENS or len(prompts) > MAX_REQUESTS:
        raise ValueError(f"{len(prompts)} prompts of {tokens} tokens do not start in one step; ask in smaller groups")
    with _without_collecting():
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return list(llm.generate(asked, list(params), use_tqdm=False))


def dense(steps: Sequence[Any], vocab: int) -> Tensor:
    """vLLM's `{token: Logprob}` of every step as f32 [steps, vocab].

    Raises:
        ValueError: a step does not cover the vocabulary.
    """
    rows = torch.empty(len(steps), vocab)
    for row, step in enumerate(steps):
        if any(token not in step for token in range(vocab)):
            raise ValueError(f"step {row} has {len(step)} tokens, all {vocab} are needed (max_logprobs=-1)")
        rows[row] = torch.tensor([step[token].logprob for token in range(vocab)])
    return rows


def forced_decode(llm: Any, sequences: Sequence[Sequence[int]], prompt_length: int, vocab: int) -> Tensor:
    """Logits f32 [sequences, length - 1 - prompt_length, vocab] of decode steps fed with the sequences' tokens.

    Raises:
        ValueError: vLLM did not follow the given tokens.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(tokens) - prompt_length,
            ignore_eos=True,
            logprobs=-1,
            detokenize=False,
            trace_decode_token_ids=list(tokens[prompt_length:]),
        )
        for tokens in sequences
    ]
    logits = []
    for tokens, result in zip(sequences, _generate(llm, [s[:prompt_length] for s in sequences], params), strict=True):
        followed = list(result.outputs[0].token_ids)
        if followed != list(tokens[prompt_length:]):
            raise ValueError(f"the replay left the given tokens: {followed[:8]} for {tokens[prompt_length:][:8]}")
        # The first step is the prefill's last row; decode starts behind it.
        logits.append(dense(result.outputs[0].logprobs[1:], vocab))
    return torch.stack(logits)


def prefill(llm: Any, sequences: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """Logits f32 [sequences, length - 1, vocab] of every prompt row but the last."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False) for _ in sequences]
    results = _generate(llm, sequences, params)
    return torch.stack([dense(result.prompt_logprobs[1:], vocab) for result in results])


def answer(llm: Any, questions: Sequence[Question], eos: int, vocab: int) -> list[Answer]:
    """Greedy answers with the two best tokens of every step (in either order where they tie) and their gap."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=q.limit, stop_token_ids=[eos], logprobs=-1, detokenize=False)
        for q in questions
    ]
    answers = []
    for result in _generate(llm, [question.prompt for question in questions], params):
        output = result.outputs[0]
        tokens = list(output.token_ids)
        if eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]
        top = dense(output.logprobs[: len(tokens)], vocab).topk(2)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        answers.append(Answer(tokens, top.indices.tolist(), margins))
    return answers
