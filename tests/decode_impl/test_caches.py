"""Caches: what is null stays null, what is given back can be reused, and FP8 has scales or does not start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_models import (
    E4M3_NOISE,
    SMALL,
    HandDriven,
    null_hashes,
    prompt_of,
    relative_rms,
    rounding_noise,
    runner_of,
    weights_of,
)

from decode_impl.caches import CacheFull, LatentCache, ScaleError, StateCache
from decode_impl.deployment import Deployment
from decode_impl.random_weights import random_checkpoint
from decode_impl.runner import SPECIALIZED, ModelRunner
from decode_impl.weights import shard_weights
from numerics.bounds import E4M3
from numerics.formats import e4m3_decode
from numerics.metrics import tensor_hash

K_SCALE = "model.layers.3.self_attn.k_scale"
Q_SCALE = "model.layers.3.self_attn.q_scale"


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_page_0_and_slot_0_never_change(backend: str, kv_cache_dtype: str) -> None:
    runner = runner_of(decode_backend=backend, kv_cache_dtype=kv_cache_dtype)
    # A pattern, since zeros written over zeros would leave no trace.
    for pool in (*runner.latents.layers.values(), *runner.states.conv.values(), *runner.states.state.values()):
        pool[0] = 3
    before = null_hashes(runner.latents, runner.states)
    requests = [HandDriven(runner, prompt_of(20 + i, i)) for i in range(3)]
    for request in requests:
        request.run(19 + request.slot % 2)
    assert null_hashes(runner.latents, runner.states) == before
    for request in requests:
        request.tokens += [7, 8]
        request.pages += [runner.latents.allocate()]
    result = runner.execute([request.chunk(1) for request in requests])  # three rows, padded to a bin of four
    assert result.path == (SPECIALIZED if backend == "latency_specialized" else "generic")
    assert null_hashes(runner.latents, runner.states) == before


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_decode_step_writes_only_the_slots_and_rows_it_owns(backend: str) -> None:
    runner = runner_of(decode_backend=backend)
    ours, other = HandDriven(runner, prompt_of(21, 1)), HandDriven(runner, prompt_of(21, 2))
    ours.run(20)
    other.run(20)
    before = {name: tensor_hash(tensor) for name, tensor in other.caches().items()}
    pool = runner.latents.layers[3].clone()
    ours.run(1)
    assert {name: tensor_hash(tensor) for name, tensor in other.caches().items()} == before
    changed = (runner.latents.layers[3] != pool).any(-1).nonzero().tolist()
    assert changed == [[ours.pages[1], 20 % 16]]


def test_a_reused_slot_starts_clear() -> None:
    states = StateCache(weights_of(), "f32", requests=1)
    slot = states.allocate()
    pools = (*states.conv.values(), *states.state.values())
    for pool in pools:
        pool[slot] = 7
    states.release(slot)
    assert states.allocate() == slot
    assert all(not pool[slot].any() for pool in pools)


def test_a_snapshot_is_a_copy_that_restores_the_same_bits() -> None:
    runner = runner_of()
    request = HandDriven(runner, prompt_of(12))
    request.run(10)
    before, snapshot = request.caches(), runner.states.snapshot(request.slot)
    request.run(1)
    assert not torch.equal(request.caches()["state(0, 0)"], before["state(0, 0)"])
    runner.states.restore(request.slot, snapshot)
    after = request.caches()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("latent"))


def test_full_caches_say_so() -> None:
    states, latents = StateCache(weights_of(), "f32", requests=2), LatentCache(weights_of(), "bf16", 2, 16)
    assert {states.allocate(), states.allocate()} == {1, 2}  # never 0
    assert {latents.allocate(), latents.allocate()} == {1, 2}
    with pytest.raises(CacheFull, match="no free slot"):
        states.allocate()
    with pytest.raises(CacheFull, match="no free page"):
        latents.allocate()


def test_a_page_is_free_once_its_last_owner_lets_go() -> None:
    latents = LatentCache(weights_of(), "bf16", pages=3, page_size=16)
    page = latents.allocate()
    latents.share(page)
    latents.share(page)
    for free in (2, 2, 3):
        latents.release(page)
        assert latents.free_pages == free
    assert latents.allocate() == page


@pytest.mark.parametrize("name", [K_SCALE, Q_SCALE])
@pytest.mark.parametrize("scale", [None, math.nan, math.inf, 0.0, -0.5])
def test_an_fp8_cache_without_a_usable_scale_is_refused(name: str, scale: float | None) -> None:
    tensors = dict(random_checkpoint(SMALL, 5).tensors)
    del tensors[name]
    if scale is not None:
        tensors[name] = torch.tensor(scale)
    weights = shard_weights(SMALL, tensors)
    with pytest.raises(ScaleError) as refusal:
        ModelRunner(weights, Deployment(kv_cache_dtype="fp8", max_batch=1, max_context=16))
    message = str(refusal.value)
    assert name.rpartition(".")[2] in message
    assert "layer 3" in message
    assert "\n" not in message
    ModelRunner(weights, Deployment(kv_cache_dtype="bf16", max_batch=1, max_context=16))  # needs no scale


def test_an_fp8_cache_stores_each_latent_within_one_e4m3_rounding() -> None:
    bf16, fp8 = (HandDriven(runner_of(kv_cache_dtype=kind), prompt_of(40)) for kind in ("bf16", "fp8"))
    bf16.run(40)
    fp8.run(40)
    _, k_scale = fp8.runner.latents.scales[3]
    # Layer 3 is the first full-attention layer: what it stores was computed from the same bits in both runs.
    exact = bf16.caches()["latent3"].double()
    stored = e4m3_decode(fp8.caches()["latent3"], torch.float64) * k_scale
    assert (exact / k_scale).abs().max() < 448
    # Half an ULP, and the roundings of the reciprocal and of the product in FP32.
    bound = (E4M3.ulp(exact / k_scale) / 2 + (exact / k_scale).abs() * 2.0**-22) * k_scale
    assert ((stored - exact).abs() <= bound).all()
    assert not torch.equal(stored, exact)


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_logits_on_an_fp8_cache_agree_with_bf16_within_the_roundings_of_query_key_and_value(backend: str) -> None:
    logits = [
        HandDriven(runner_of(kv_cache_dtype=kind, decode_backend=backend), prompt_of(40)).run(30, *[1] * 10)
        for kind in ("bf16", "fp8")
    ]
    difference = relative_rms(logits[1], logits[0])
    assert 0 < difference <= math.hypot(rounding_noise(SMALL), math.sqrt(3) * E4M3_NOISE)


def test_a_bf16_state_is_stored_as_such() -> None:
    config = replace(SMALL, num_hidden_layers=1, full_attention_layers=())
    states = StateCache(weights_of(config), "bf16", requests=1)
    assert {pool.dtype for pool in states.state.values()} == {torch.bfloat16}
