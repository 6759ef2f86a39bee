"""Our half: the same cases through our model runner, as logits by view and as greedy answers with their margins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.vllm_reference.cases import Cases, Question
from benchmarks.vllm_reference.outputs import FIRST, Answer, Outputs, compositions
from decode_impl.batch import Chunk
from decode_impl.checkpoint import load_checkpoint
from decode_impl.deployment import Deployment
from decode_impl.runner import BUILTIN_PATHS, ModelRunner, Paths
from decode_impl.weights import shard_weights

PREFILL_CHUNK = 256
"""Tokens of a question's prompt per step."""


@dataclass(frozen=True)
class Variant:
    """How our half decodes: the path, its ops, the number of (virtual) ranks, and the device."""

    ranks: int = 1
    backend: str = "auto"
    paths: Paths = BUILTIN_PATHS
    device: str = "cpu"


def runner(folder: Path, variant: Variant, batch: int, context: int) -> ModelRunner:
    """A model runner with a BF16 latent cache and room for `batch` requests of `context` tokens."""
    checkpoint = load_checkpoint(folder)
    weights = shard_weights(checkpoint.config, checkpoint.tensors, variant.ranks, torch.device(variant.device))
    deployment = Deployment(
        decode_backend=variant.backend,
        kv_cache_dtype="bf16",
        tensor_parallel=variant.ranks,
        max_batch=batch,
        max_context=context,
    )
    return ModelRunner(weights, deployment, variant.paths)


@dataclass
class _Request:
    slot: int
    pages: tuple[int, ...]
    computed: int = 0

    def chunk(self, tokens: Sequence[int]) -> Chunk:
        chunk = Chunk(list(tokens), self.computed, self.slot, self.pages)
        self.computed += len(tokens)
        return chunk


@contextmanager
def _requests(on: ModelRunner, lengths: Sequence[int]) -> Iterator[list[_Request]]:
    """Requests with slots and pages for the given lengths, given back at the end."""
    made = []
    for length in lengths:
        pages = tuple(on.latents.allocate() for _ in range(-(-length // on.deployment.page_size)))
        made.append(_Request(on.states.allocate(), pages))
    try:
        yield made
    finally:
        for request in made:
            on.states.release(request.slot)
            for page in request.pages:
                on.latents.release(page)


def forced_decode(on: ModelRunner, sequences: Sequence[Sequence[int]], prompt_length: int) -> Tensor:
    """Logits f32 [sequences, length - 1 - prompt_length, vocab] of decode steps that are fed the sequences' tokens."""
    length = len(sequences[0])
    with _requests(on, [length] * len(sequences)) as requests:
        members = list(zip(requests, sequences, strict=True))
        on.execute([request.chunk(tokens[:prompt_length]) for request, tokens in members])
        steps = [
            on.execute([request.chunk(tokens[position : position + 1]) for request, tokens in members]).logits
            for position in range(prompt_length, length - 1)
        ]
    return torch.stack([logits.cpu() for logits in steps], dim=1)


def prefill(on: ModelRunner, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits f32 [sequences, length - 1, vocab] of every row of the sequences, prefilled in one step."""
    length = len(sequences[0])
    with _requests(on, [length] * len(sequences)) as requests:
        chunks = [request.chunk(tokens[:-1]) for request, tokens in zip(requests, sequences, strict=True)]
        logits = on.execute(chunks, all_logits=True).logits
    return logits.view(len(sequences), length - 1, -1).cpu()


def answer(on: ModelRunner, questions: Sequence[Question], eos: int) -> list[Answer]:
    """Greedy answers: prompts one after another in chunks, then all requests decoded together until each has ended."""
    lengths = [len(question.prompt) + question.limit for question in questions]
    answers = [Answer([], [], []) for _ in questions]
    with _requests(on, lengths) as requests:
        latest = [_prompt(on, request, question.prompt) for request, question in zip(requests, questions, strict=True)]
        open_ones = list(range(len(questions)))
        while True:
            for row, index in enumerate(open_ones):
                _extend(answers[index], latest[row])
            open_ones = [i for i in open_ones if not _ended(answers[i], questions[i].limit, eos)]
            if not open_ones:
                return answers
            latest = list(on.execute([requests[i].chunk(answers[i].tokens[-1:]) for i in open_ones]).logits)


def _prompt(on: ModelRunner, request: _Request, prompt: Sequence[int]) -> Tensor:
    for start in range(0, len(prompt), PREFILL_CHUNK):
        logits = on.execute([request.chunk(prompt[start : start + PREFILL_CHUNK])]).logits
    return logits[0]


def _extend(given: Answer, logits: Tensor) -> None:
    values, ids = logits.topk(2)
    # Among equal logits the lowest id wins.
    first = int(logits.argmax())
    given.tokens.append(first)
    given.best.append([first, next(i for i in ids.tolist() if i != first)])
    given.margin.append(float(values[0] - values[1]))


def _ended(given: Answer, limit: int, eos: int) -> bool:
    return given.tokens[-1] == eos or len(given.tokens) == limit


def decode_all(
    folder: Path, cases: Cases, variant: Variant, with_answers: bool = True, both_compositions: bool = True
) -> Outputs:
    """Every view of the cases, and the answers in the first composition."""
    context = max(cases.length, *(len(q.prompt) + q.limit for q in cases.questions), 1)
    on = runner(folder, variant, max(len(cases.sequences), len(cases.questions), 1), context)
    outputs = Outputs({"implementation": "decode_impl", "path": variant.backend, "ranks": variant.ranks})
    outputs.about |= {"device": variant.device, "torch": torch.__version__}
    for view, decode in {
        "decode": partial(forced_decode, prompt_length=cases.prompt_length),
        "prefill": prefill,
    }.items():
        outputs.views[view] = {
            name: torch.cat([decode(on, [cases.sequences[i] for i in group]) for group in groups])
            for name, groups in compositions(len(cases.sequences)).items()
            if both_compositions or name == FIRST
        }
    if with_answers:
        outputs.answers = {FIRST: answer(on, cases.questions, cases.eos)}
    return outputs
