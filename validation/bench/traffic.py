"""Bytes that a decode step cannot avoid to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from decode_impl.weights import ModelWeights, MoeWeights


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from _tensors(part)
    elif is_dataclass(x):
        for field in fields(x):
            yield from _tensors(getattr(x, field.name))


def weight_bytes(x: Any) -> int:
    """Bytes of all tensors in a nest of weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(x))


def step_bytes(weights: ModelWeights, experts: Sequence[int], requests: int, width: int, context: int) -> int:
    """Bytes that a step has to move once: all weights, but of routed experts those chosen (`experts`: how many, by MoE
    layer), of the embedding its rows; seen latent rows in FP8; states read, and written after every token.
    """
    config = weights.config
    total = weight_bytes(weights) - weight_bytes(weights.embedding) + requests * width * config.hidden_size * 2
    routed = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MoeWeights)]
    for chosen, mlp in zip(experts, routed, strict=True):
        total -= weight_bytes((mlp.w13, mlp.w2)) * (config.num_experts - chosen) // config.num_experts
    total += len(config.full_attention_layers) * requests * (context + width) * config.latent_row
    state = config.kda_heads * config.kda_head_dim**2 * 4
    return total + len(config.kda_layers) * requests * (1 + width) * state
