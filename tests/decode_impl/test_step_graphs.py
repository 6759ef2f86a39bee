"""Captured steps: their shapes, their null rows, and that a replay over fixed tensors is the eager step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import HandDriven, prompt_of, weights_of
from test_speculation import FAST, drafter_of, verify_chunk

from decode_impl.batch import build_batch
from decode_impl.deployment import Deployment, DeploymentError
from decode_impl.model import Step
from decode_impl.runner import GENERIC, SPECIALIZED, ModelRunner
from decode_impl.specialized.graphs import StepGraphs, null_batch, shape_of, shapes
from numerics.metrics import tensor_hash

DRAFTS = 3


def rerun(step: Callable[[], Step]) -> tuple[Step, Callable[[], None]]:
    """A capture for devices without graphs: every replay runs the step again, into the tensors of the first run."""
    results = step()
    results = Step(results.logits.clone(), tuple(tap.clone() for tap in results.taps))

    def replay() -> None:
        again = step()
        results.logits.copy_(again.logits)
        for kept, tap in zip(results.taps, again.taps, strict=True):
            kept.copy_(tap)

    return results, replay


def runner_of(graphs: list[tuple[int, int]] | None = None) -> ModelRunner:
    deployment = Deployment(FAST, "fp8", drafts=DRAFTS, max_batch=4, max_context=128, page_size=16, prefix_block=32)
    runner = ModelRunner(weights_of(), deployment, drafter=drafter_of())
    if graphs is not None:
        runner.graphs = StepGraphs(
            lambda batch: runner._forward(runner.paths.specialized, batch),
            rerun,
            graphs,
            deployment.page_size,
            deployment.max_pages,
            torch.device("cpu"),
        )
    return runner


def test_a_deployment_captures_every_bin_that_its_steps_can_fill() -> None:
    assert shapes(6, 0) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert shapes(3, 4) == [(1, 1), (2, 1), (4, 1), (8, 5), (16, 5)]
    assert shapes(1000, 7)[-4:] == [(8, 8), (16, 8), (32, 8), (64, 8)]


@pytest.mark.parametrize("width", [1, 4, 6, 8])
def test_the_shape_of_a_step_is_a_function_of_its_bin_and_width_alone(width: int) -> None:
    wanted = null_batch(32, width, 16, 8)
    for requests in range(1, 32 // width + 1):
        runner = ModelRunner(
            weights_of(), Deployment(FAST, drafts=7, max_batch=32, max_context=128), drafter=drafter_of()
        )
        driven = [HandDriven(runner, prompt_of(40, seed=i)) for i in range(requests)]
        for request in driven:
            request.computed = 30
        chunks = [request.chunk(1) if width == 1 else verify_chunk(request, width) for request in driven]
        batch = build_batch(chunks, 16, 8, pad_to=32)
        assert shape_of(batch) == shape_of(wanted) == (32, width)
        assert (batch.decode_rows, batch.attend_rows) == (wanted.decode_rows, 32)
        assert [rows.rows for rows in batch.verify] == [rows.rows for rows in wanted.verify]


@pytest.mark.parametrize("width", [1, 4])
def test_a_step_of_null_rows_writes_nothing(width: int) -> None:
    runner = runner_of()
    request = HandDriven(runner, prompt_of(40))
    request.run(30)
    pools = [*runner.latents.layers.values(), *runner.states.conv.values(), *runner.states.state.values()]
    before = [tensor_hash(pool) for pool in pools]
    runner._forward(runner.paths.specialized, null_batch(8, width, 16, 8))
    assert [tensor_hash(pool) for pool in pools] == before


def test_replayed_steps_give_the_bits_of_eager_ones() -> None:
    """Decode and verify steps of one to four requests, one after the other, caches and drafter included."""
    eager, replayed = runner_of(), runner_of(shapes(4, DRAFTS))
    logits: list[list[torch.Tensor]] = []
    for runner in (eager, replayed):
        driven = [HandDriven(runner, prompt_of(60, seed=i)) for i in range(4)]
        for request in driven:
            request.run(30)
        steps = []
        for count in (1, 3, 4, 2):
            steps.append(runner.execute([request.chunk(1) for request in driven[:count]]))
            verify = [verify_chunk(request, 1 + DRAFTS) for request in driven[:count]]
            steps.append(runner.execute(verify))
        assert all(step.path == SPECIALIZED for step in steps)
        logits.append([step.logits for step in steps])
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    for name in ("conv", "state"):
        pools = getattr(eager.states, name)
        assert all(torch.equal(pool, getattr(replayed.states, name)[key]) for key, pool in pools.items())


def test_a_shape_without_a_graph_runs_generic_and_says_so() -> None:
    runner = runner_of([(1, 1)])
    driven = [HandDriven(runner, prompt_of(40, seed=i)) for i in range(2)]
    for request in driven:
        request.run(30)
    assert runner.execute([driven[0].chunk(1)]).path == SPECIALIZED
    assert runner.execute([request.chunk(1) for request in driven]).path == GENERIC
    assert runner.fallbacks["no graph was captured for this shape"] == 1


@pytest.mark.parametrize("backend", ["auto", FAST])
def test_graphs_where_there_are_none_are_refused(backend: str) -> None:
    with pytest.raises(DeploymentError, match="graphs need decode_backend latency_specialized on a CUDA device"):
        ModelRunner(weights_of(), Deployment(backend, graphs=True))
