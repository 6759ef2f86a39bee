"""Random weights of a whole model, made on the device that measures: 108 GB would take too long to load."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from decode_impl.config import ModelConfig
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.weights import (
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    ResidualWeights,
)

FP8_SCALES = (0.05, 0.05)


def random_weights(config: ModelConfig, device: torch.device, seed: int = 0) -> ModelWeights:
    """One rank's weights of `config`: unit-variance projections, norms of 1, every layer's its own."""
    draw = _Draw(device, seed)
    H = config.hidden_size
    return ModelWeights(
        config=config,
        ranks=1,
        embedding=draw.matrix(config.vocab_size, H, std=1.0),
        layers=tuple(_layer(config, draw, i) for i in range(config.num_hidden_layers)),
        final_residual=_residual(config, draw, False),
        norm=draw.ones(H),
        lm_head=(draw.matrix(config.vocab_size, H),),
    )


class _Draw:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, *shape: int, std: float | None = None) -> Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return x.normal_(0.0, std or shape[-1] ** -0.5, generator=self._generator)

    def ones(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)

    def floats(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(mean, std, generator=self._generator)

    def mxfp4(self, *shape: int) -> MXFP4Weight:
        """Random codes, of RMS about 3, and one scale for products of unit variance."""
        experts, outputs, inputs = shape
        codes = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8, device=self.device)
        middle = 127 + round(math.log2(1.0 / (3.0 * math.sqrt(inputs))))
        scale = torch.full((experts, outputs, inputs // 32), middle, dtype=torch.uint8, device=self.device)
        return MXFP4Weight(codes.random_(0, 256, generator=self._generator), scale)


def _residual(config: ModelConfig, draw: _Draw, inner: bool) -> ResidualWeights:
    H = config.hidden_size
    return ResidualWeights(draw.ones(H), draw.matrix(H), draw.ones(H) if inner else None)


def _layer(config: ModelConfig, draw: _Draw, index: int) -> LayerWeights:
    H = config.hidden_size
    attention: Any = _mla(config, draw) if config.is_mla(index) else _kda(config, draw)
    mlp: Any = (_mlp(draw, H, config.intermediate_size),) if config.is_dense(index) else _moe(config, draw)
    return LayerWeights((attention,), mlp, _residual(config, draw, True), _residual(config, draw, True))


def _kda(config: ModelConfig, draw: _Draw) -> KdaWeights:
    h, d, H = config.kda_heads, config.kda_head_dim, config.hidden_size
    return KdaWeights(
        heads=h,
        in_proj=draw.matrix((4 * h + 1) * d + h, H),
        f_b=draw.matrix(h * d, d),
        conv=draw.floats(3 * h * d, config.conv_kernel, std=0.5),
        A_log=draw.floats(h, mean=1.0, std=0.5),
        dt_bias=draw.floats(h * d, mean=-3.0, std=0.5),
        norm=draw.ones(d),
        o_proj=draw.matrix(H, h * d),
    )


def _mla(config: ModelConfig, draw: _Draw) -> MlaWeights:
    h, H, C = config.mla_heads, config.hidden_size, config.kv_lora_rank
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return MlaWeights(
        heads=h,
        a_proj=draw.matrix(config.q_lora_rank + config.latent_row + h * v, H),
        q_norm=draw.ones(config.q_lora_rank),
        kv_norm=draw.ones(C),
        q_b=draw.matrix(h * (nope + rope), config.q_lora_rank),
        w_uk=draw.matrix(h, nope, C),
        w_uv=draw.matrix(h, C, v),
        o_proj=draw.matrix(H, h * v),
        k_scale=FP8_SCALES[0],
        q_scale=FP8_SCALES[1],
    )


def _mlp(draw: _Draw, hidden: int, width: int) -> MlpWeights:
    return MlpWeights(draw.matrix(2 * width, hidden), draw.matrix(hidden, width))


def _moe(config: ModelConfig, draw: _Draw) -> MoeWeights:
    H, L, E, width = config.hidden_size, config.latent_size, config.num_experts, config.moe_intermediate_size
    return MoeWeights(
        gate=draw.matrix(E, H),
        bias=draw.floats(E, std=0.05),
        down=draw.matrix(L, H),
        norm=draw.ones(L),
        up=draw.matrix(H, L),
        w13=(draw.mxfp4(E, 2 * width, L),),
        w2=(draw.mxfp4(E, L, width),),
        shared=(_mlp(draw, H, config.shared_intermediate_size),),
    )
