"""Small random models and the few steps that most decode tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.caches import LatentCache, StateCache
from decode_impl.config import ModelConfig
from decode_impl.deployment import Deployment
from decode_impl.engine import Engine
from decode_impl.presets import K3_MINI
from decode_impl.random_weights import random_checkpoint
from decode_impl.runner import ModelRunner
from decode_impl.weights import ModelWeights, shard_weights
from numerics.bounds import BF16, E4M3
from numerics.metrics import error_stats, tensor_hash

SMALL = replace(
    K3_MINI,
    name="small",
    hidden_size=64,
    num_hidden_layers=4,
    full_attention_layers=(3,),
    attn_res_block_size=2,
    kda_heads=2,
    mla_heads=2,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    intermediate_size=64,
    num_experts=4,
    experts_per_token=4,
    latent_size=32,
    moe_intermediate_size=64,
)
"""Every token takes every expert: with random weights experts are nearly tied, and a choice among them would turn a
rounding into another answer. Selection is left to `SPARSE`, for bit-exact promises only."""

SPARSE = replace(SMALL, name="sparse", num_experts=16, experts_per_token=2)
"""As `SMALL`, with experts to choose from."""

_ROUNDINGS_PER_LAYER = 24
"""BF16 roundings that one layer puts between its input and its output, counted in docs/ops.md: 10 to 12 in attention
with the mix in front of it, 12 in the latent MoE with its own."""


@cache
def weights_of(config: ModelConfig = SMALL, ranks: int = 1, seed: int = 5) -> ModelWeights:
    """Random weights of `config`, made once per session; nothing writes to weights."""
    return shard_weights(config, random_checkpoint(config, seed).tensors, ranks)


def runner_of(config: ModelConfig = SMALL, **options: Any) -> ModelRunner:
    """A runner with fresh caches; `options` are those of `Deployment`."""
    defaults = {"max_batch": 8, "max_context": 128, "page_size": 16, "prefix_block": 32}
    deployment = Deployment(**(defaults | options))
    return ModelRunner(weights_of(config, deployment.tensor_parallel), deployment)


def engine_of(config: ModelConfig = SMALL, **options: Any) -> Engine:
    """An engine over `runner_of(...)`."""
    return Engine(runner_of(config, **options))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random text-like token ids."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class HandDriven:
    """One request driven by hand through a runner: its slot, its pages, and how many tokens are cached."""

    def __init__(self, runner: ModelRunner, tokens: Sequence[int]) -> None:
        self.runner, self.tokens, self.computed = runner, list(tokens), 0
        self.slot = runner.states.allocate()
        pages = -(-len(self.tokens) // runner.deployment.page_tokens)
        self.pages = [runner.latents.allocate() for _ in range(pages)]

    def chunk(self, length: int) -> Chunk:
        """The next `length` tokens as a chunk; counts them as computed."""
        start, self.computed = self.computed, self.computed + length
        return Chunk(self.tokens[start : self.computed], start, self.slot, tuple(self.pages))

    def run(self, *lengths: int) -> Tensor:
        """Run chunks of these lengths one after another; logits of all their rows, f32 [sum, vocab]."""
        return torch.cat([self.runner.execute([self.chunk(n)], all_logits=n > 1).logits for n in lengths])

    def caches(self) -> dict[str, Tensor]:
        """What the request left behind: state and conv window per layer and rank, latent rows per MLA layer."""
        states, latents = self.runner.states, self.runner.latents
        contents = {f"conv{key}": pool[self.slot].clone() for key, pool in states.conv.items() if pool.numel()}
        contents |= {f"state{key}": pool[self.slot].clone() for key, pool in states.state.items() if pool.numel()}
        for layer, pool in latents.layers.items():
            contents[f"latent{layer}"] = pool[self.pages].flatten(0, 1)[: self.computed].clone()
        return contents


def rounding_noise(config: ModelConfig) -> float:
    """Relative RMS by which two runs may differ whose every BF16 rounding falls independently.

    One rounding errs by up to the unit roundoff u of the binade it is in: u/sqrt(3) of the binade in RMS, where values
    have an RMS of sqrt(7/3) binades, hence u/sqrt(7) of the value. Normalised layers pass errors on with a gain of
    about 1, so R roundings add in quadrature, and two runs differ by sqrt(2) times that.
    """
    roundings = _ROUNDINGS_PER_LAYER * config.num_hidden_layers + 3
    return math.sqrt(2 * roundings / 7) * BF16.unit_roundoff


E4M3_NOISE = E4M3.unit_roundoff / math.sqrt(7)
"""Relative RMS of one rounding to E4M3, by the same reckoning."""


def relative_rms(candidate: Tensor, reference: Tensor) -> float:
    """RMS of the difference over the RMS of the reference; infinite where the candidate is not finite."""
    return error_stats(candidate, reference).rmse_ratio


def null_hashes(latents: LatentCache, states: StateCache) -> list[str]:
    """Hashes of page 0 and slot 0 of every pool."""
    pools = [*latents.layers.values(), *states.conv.values(), *states.state.values()]
    return [tensor_hash(pool[0]) for pool in pools]
