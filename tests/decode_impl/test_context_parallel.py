"""Decode context parallelism in the engine: shards of ranks' own pools give what one rank holding everything gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import SMALL, HandDriven, engine_of, prompt_of, relative_rms, rounding_noise, runner_of, weights_of
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment, DeploymentError, prefix_block_for
from decode_impl.drafter.model import DrafterModel
from decode_impl.engine import Engine
from decode_impl.parts import PARTS
from decode_impl.runner import SPECIALIZED, ModelRunner

BACKENDS = ("auto", "latency_specialized")
FORMATS = ("bf16", "fp8")


def runner(ranks: int, context: int, **options: Any) -> ModelRunner:
    parallel = {"tensor_parallel": ranks, "context_parallel": context, "prefix_block": prefix_block_for(context)}
    return runner_of(**(parallel | options))


def drive(on: ModelRunner, length: int, steps: int) -> tuple[Tensor, HandDriven]:
    request = HandDriven(on, prompt_of(length + steps))
    return request.run(length, *[1] * steps), request


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 60])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_generic_logits_agree_with_those_of_whole_contexts_within_the_roundings(ranks: int, length: int) -> None:
    """Prompts of one token leave every rank but the first without keys."""
    whole, _ = drive(runner(ranks, 1), length, 6)
    shared, _ = drive(runner(ranks, ranks), length, 6)
    assert relative_rms(shared, whole) <= rounding_noise(SMALL)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_specialised_logits_agree_with_those_of_whole_contexts_and_ran_specialised(ranks: int, kv: str) -> None:
    options = {"decode_backend": "latency_specialized", "kv_cache_dtype": kv}
    whole, _ = drive(runner(ranks, 1, **options), 21, 12)
    on = runner(ranks, ranks, **options)
    shared, _ = drive(on, 21, 12)
    assert on.steps[SPECIALIZED] == 12
    assert relative_rms(shared, whole) <= rounding_noise(SMALL)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_prompt_gives_the_bits_that_it_gives_with_whole_contexts(ranks: int, kv: str) -> None:
    """Rows are stored alike and gathered in order, in chunks as well as at once."""
    lengths = (5, 17, 30)
    whole, shared = (HandDriven(runner(ranks, n, kv_cache_dtype=kv), prompt_of(52)) for n in (1, ranks))
    assert torch.equal(whole.run(*lengths), shared.run(*lengths))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_holds_its_own_tokens_and_nothing_of_the_others(ranks: int) -> None:
    on = runner(ranks, ranks)
    _, request = drive(on, 19, 4)
    whole = drive(runner(ranks, 1), 19, 4)[1].caches()["latent3"]
    for rank, pools in enumerate(on.latents.shards):
        held = len(range(rank, 23, ranks))
        rows = pools[3][request.pages].flatten(0, 1)
        assert relative_rms(rows[:held].float(), whole[rank::ranks].float()) <= rounding_noise(SMALL)
        assert not rows[held:].any()
        assert not pools[3][0].any()
        assert int(pools[3].any(-1).sum()) == held
    pointers = [pools[3].data_ptr() for pools in on.latents.shards]
    assert len(set(pointers)) == ranks


def verify_logits(on: ModelRunner, prompt: int, width: int) -> Tensor:
    """Logits of a verify step of `width` rows behind a prompt, f32 [width, vocab]."""
    request = HandDriven(on, prompt_of(prompt + width))
    on.execute([request.chunk(prompt)])
    chunk = request.chunk(width)
    targets = tuple(range(request.slot, request.slot + width))
    verify = Chunk(chunk.tokens, chunk.start, request.slot, chunk.pages, targets)
    return on.execute([verify]).logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("prompt", "width"), [(1, 4), (2, 8), (13, 6), (31, 8)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_of_a_verify_step_see_what_single_steps_see(backend: str, prompt: int, width: int, ranks: int) -> None:
    """Bounds are of the whole context: a rank's own length says nothing about a row in the middle of the step."""
    verified = verify_logits(speculative(ranks, decode_backend=backend, drafts=width - 1), prompt, width)
    single, _ = drive(runner(ranks, ranks, decode_backend=backend), prompt, width)
    assert relative_rms(verified, single[-width:]) <= rounding_noise(SMALL)


def speculative(ranks: int, **options: Any) -> ModelRunner:
    """A runner that takes verify steps, whose drafts the test brings itself."""
    deployment = replace(runner(ranks, ranks).deployment, **options)
    nobody = cast(DrafterModel, SimpleNamespace(config=SimpleNamespace(max_drafts=7)))
    parts = {**PARTS, "drafter": lambda *shape: None}
    return ModelRunner(weights_of(SMALL, ranks), deployment, parts=parts, drafter=nobody)


def answers(engine: Engine, lengths: Sequence[int]) -> list[list[int]]:
    for i, length in enumerate(lengths):
        engine.add(f"r{i}", prompt_of(length, i), max_tokens=9)
    engine.run()
    return [list(engine.request(f"r{i}").output) for i in range(len(lengths))]


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_engine_gives_all_pages_back_and_takes_a_page_for_as_many_tokens_as_its_ranks_hold(ranks: int) -> None:
    engine = engine_of(
        tensor_parallel=ranks, context_parallel=ranks, prefix_block=prefix_block_for(ranks), prefix_snapshots=0
    )
    answers(engine, [1, 3, 40, 70])
    assert engine.runner.latents.free_pages == engine.runner.deployment.pool_pages
    assert engine.runner.deployment.max_pages == -(-128 // (16 * ranks))


@pytest.mark.parametrize("given", [0, 3, 16, True, "8", 8.0])
def test_a_context_parallelism_that_is_neither_1_nor_that_of_tensors_is_refused_in_one_line(given: Any) -> None:
    with pytest.raises(DeploymentError) as refused:
        Deployment(tensor_parallel=8, context_parallel=given, prefix_block=128)
    assert str(refused.value) == f"context_parallel is {given!r}, allowed are 1, 8"


def test_prefixes_must_end_where_pages_of_all_ranks_do() -> None:
    with pytest.raises(
        DeploymentError, match="prefix_block is 64, a multiple of page_size 16 times context_parallel 8"
    ):
        Deployment(tensor_parallel=8, context_parallel=8)
    assert prefix_block_for(8) == 128
