"""Whole steps replayed from CUDA graphs: the bits of eager steps, and a counted fallback where there is no graph."""

from __future__ import annotations

import pytest
import torch
from small_models import HandDriven, prompt_of
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.checkpoint import load_checkpoint
from decode_impl.deployment import Deployment
from decode_impl.drafter.checkpoint import load_drafter
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.runner import GENERIC, SPECIALIZED, ModelRunner
from decode_impl.weights import shard_weights

DRAFTS = 3


def runner_of(graphs: bool, ranks: int = 1) -> ModelRunner:
    checkpoint = load_checkpoint(EMBEDDED_MODEL)
    weights = shard_weights(checkpoint.config, checkpoint.tensors, ranks, torch.device("cuda"))
    deployment = Deployment(
        "latency_specialized",
        "fp8",
        tensor_parallel=ranks,
        context_parallel=ranks,
        max_batch=4,
        max_context=128,
        drafts=DRAFTS,
        prefix_block=32,
        graphs=graphs,
    )
    return ModelRunner(weights, deployment, drafter=load_drafter(EMBEDDED_MODEL / "drafter"))


def verify_chunk(request: HandDriven) -> Chunk:
    start, width = request.computed, 1 + DRAFTS
    tokens = request.tokens[start : start + width]
    return Chunk(tokens, start, request.slot, tuple(request.pages), targets=range(request.slot, request.slot + width))


def played(runner: ModelRunner) -> list[Tensor]:
    """Logits of decode and verify steps of one to four requests, and the states and latent rows that they leave."""
    driven = [HandDriven(runner, prompt_of(60, seed=i)) for i in range(4)]
    for request in driven:
        request.run(30)
    results = []
    for count in (1, 3, 4, 2):
        steps = [runner.execute([request.chunk(1) for request in driven[:count]])]
        steps.append(runner.execute([verify_chunk(request) for request in driven[:count]]))
        assert all(step.path == SPECIALIZED for step in steps)
        results += [step.logits.clone() for step in steps]
    return [*results, *(pool.clone() for pool in runner.states.state.values()), *pools_of(runner)]


def pools_of(runner: ModelRunner) -> list[Tensor]:
    return [pool for own in runner.latents.shards for pool in own.values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_replayed_steps_give_the_bits_of_eager_ones(ranks: int) -> None:
    """Two ranks hold half of every context each."""
    eager, *graphs = (played(runner_of(captured, ranks)) for captured in (False, True, True))
    replayed, again = graphs
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(replayed, again, strict=True))


def test_a_shape_without_a_graph_runs_generic_and_says_so() -> None:
    runner = runner_of(True)
    assert runner.graphs is not None
    runner.graphs._steps.pop((1, 1))
    request = HandDriven(runner, prompt_of(40))
    request.run(30)
    assert runner.execute([request.chunk(1)]).path == GENERIC
    assert runner.fallbacks["no graph was captured for this shape"] == 1
