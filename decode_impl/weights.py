"""Weights as the ops take them: packed per rank from a checkpoint's tensors.

On a CPU, BF16 weights are kept as FP32 tensors that hold BF16 values, since its matrix products want FP32; the numbers
are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_impl.checkpoint import fp8_scale_names
from decode_impl.config import ModelConfig
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.parallel.shard import share


@dataclass(frozen=True)
class ResidualWeights:
    """One AttnRes: key norm, query, and the norm in front of the sublayer (absent at the end of the model)."""

    norm: Tensor
    query: Tensor
    out_norm: Tensor | None


@dataclass(frozen=True)
class KdaWeights:
    """One rank's heads of a KDA layer. in_proj rows: q, k, v, g, f_a (replicated), beta."""

    heads: int
    in_proj: Tensor
    f_b: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    o_proj: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """One rank's heads of an MLA layer. a_proj rows: q_a, kv_a (both replicated), gate. Scales are FP8's, or None."""

    heads: int
    a_proj: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Tensor
    w_uk: Tensor
    w_uv: Tensor
    o_proj: Tensor
    k_scale: float | None
    q_scale: float | None


@dataclass(frozen=True)
class MlpWeights:
    """One rank's columns of a dense MLP or of the shared expert; gate rows first."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """One latent-MoE layer: router, latent projections and norm replicated; experts and shared expert per rank."""

    gate: Tensor
    bias: Tensor
    down: Tensor
    norm: Tensor
    up: Tensor
    w13: tuple[MXFP4Weight, ...]
    w2: tuple[MXFP4Weight, ...]
    shared: tuple[MlpWeights, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention per rank, MLP (dense per rank, or MoE), and the two residual mixes."""

    attention: tuple[KdaWeights, ...] | tuple[MlaWeights, ...]
    mlp: tuple[MlpWeights, ...] | MoeWeights
    attention_residual: ResidualWeights
    mlp_residual: ResidualWeights


@dataclass(frozen=True)
class ModelWeights:
    """A whole model, sharded over `ranks` tensor-parallel ranks; `lm_head` is split by vocabulary rows."""

    config: ModelConfig
    ranks: int
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_residual: ResidualWeights
    norm: Tensor
    lm_head: tuple[Tensor, ...]


_MOST_RANKS = 64
"""Ranks of the largest domain that the decode is meant for, with room."""


class _Reader:
    """Tensors of one layer by upstream name, on the model's device and in its compute dtype."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> None:
        self._tensors, self._prefix, self._device = tensors, prefix, device

    def raw(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name].to(self._device)

    def __call__(self, name: str) -> Tensor:
        tensor = self.raw(name)
        return tensor.float() if self._device.type == "cpu" else tensor

    def below(self, name: str) -> _Reader:
        return _Reader(self._tensors, f"{self._prefix}{name}.", self._device)


def shard_weights(
    config: ModelConfig, tensors: Mapping[str, Tensor], ranks: int = 1, device: torch.device | None = None
) -> ModelWeights:
    """Cut a checked checkpoint's tensors into every rank's weights.

    Raises:
        ValueError: more ranks than any deployment has, or an expert's width that cannot be cut into `ranks` shares
            without cutting MXFP4 blocks apart.
    """
    if not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"tensor_parallel is {ranks}, allowed are 1 to {_MOST_RANKS}")
    read = _Reader(tensors, "", device or torch.device("cpu"))
    rows = [share(config.vocab_size, ranks, r) for r in range(ranks)]
    head = read("lm_head.weight")
    return ModelWeights(
        config=config,
        ranks=ranks,
        embedding=read.raw("model.embed_tokens.weight"),
        layers=tuple(
            _layer(config, read.below(f"model.layers.{i}"), i, ranks) for i in range(config.num_hidden_layers)
        ),
        final_residual=_residual(read.below("model"), "output_attn_res", None),
        norm=read("model.norm.weight"),
        lm_head=tuple(head[a:b].contiguous() for a, b in rows),
    )


def _residual(read: _Reader, stem: str, out_norm: str | None) -> ResidualWeights:
    query = read(f"{stem}_proj.weight").squeeze(0)
    return ResidualWeights(read(f"{stem}_norm.weight"), query, read(f"{out_norm}.weight") if out_norm else None)


def _layer(config: ModelConfig, read: _Reader, index: int, ranks: int) -> LayerWeights:
    attention = read.below("self_attn")
    sharded: tuple[KdaWeights, ...] | tuple[MlaWeights, ...]
    if config.is_mla(index):
        scales = tuple(_optional_scale(read, name.split(f"layers.{index}.")[1]) for name in fp8_scale_names(index))
        sharded = tuple(_mla(config, attention, share(config.mla_heads, ranks, r), scales) for r in range(ranks))
    else:
        sharded = tuple(_kda(config, attention, share(config.kda_heads, ranks, r)) for r in range(ranks))
    mlp: tuple[MlpWeights, ...] | MoeWeights
    if config.is_dense(index):
        mlp = _mlp(read.below("mlp"), config.intermediate_size, ranks)
    else:
        mlp = _moe(config, read.below("block_sparse_moe"), ranks)
    return LayerWeights(
        attention=sharded,
        mlp=mlp,
        attention_residual=_residual(read, "self_attention_res", "input_layernorm"),
        mlp_residual=_residual(read, "mlp_res", "post_attention_layernorm"),
    )


def _optional_scale(read: _Reader, name: str) -> float | None:
    try:
        return float(read.raw(name))
    except KeyError:
        return None


def _kda(config: ModelConfig, read: _Reader, heads: tuple[int, int]) -> KdaWeights:
    rows = slice(heads[0] * config.kda_head_dim, heads[1] * config.kda_head_dim)
    projections = [read(f"{x}_proj.weight")[rows] for x in "qkvg"]
    beta = read("b_proj.weight")[heads[0] : heads[1]]
    return KdaWeights(
        heads=heads[1] - heads[0],
        in_proj=torch.cat([*projections, read("f_a_proj.weight"), beta]),
        f_b=read("f_b_proj.weight")[rows].contiguous(),
        conv=torch.cat([read.raw(f"{x}_conv1d.weight")[rows, 0].float() for x in "qkv"]),
        A_log=read.raw("A_log").flatten()[heads[0] : heads[1]],
        dt_bias=read.raw("dt_bias")[rows],
        norm=read("o_norm.weight"),
        o_proj=read("o_proj.weight")[:, rows].contiguous(),
    )


def _mla(config: ModelConfig, read: _Reader, heads: tuple[int, int], scales: tuple[float | None, ...]) -> MlaWeights:
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    values = slice(heads[0] * config.v_head_dim, heads[1] * config.v_head_dim)
    kv_b = read("kv_b_proj.weight").unflatten(0, (config.mla_heads, -1))[heads[0] : heads[1]]
    nope, v = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return MlaWeights(
        heads=heads[1] - heads[0],
        a_proj=torch.cat([read("q_a_proj.weight"), read("kv_a_proj_with_mqa.weight"), read("g_proj.weight")[values]]),
        q_norm=read("q_a_layernorm.weight"),
        kv_norm=read("kv_a_layernorm.weight"),
        q_b=read("q_b_proj.weight")[heads[0] * query : heads[1] * query].contiguous(),
        w_uk=nope.contiguous(),
        w_uv=v.transpose(1, 2).contiguous(),
        o_proj=read("o_proj.weight")[:, values].contiguous(),
        k_scale=scales[0],
        q_scale=scales[1],
    )


def _mlp(read: _Reader, width: int, ranks: int) -> tuple[MlpWeights, ...]:
    gate, up, down = (read(f"{x}_proj.weight") for x in ("gate", "up", "down"))
    shares = [slice(*share(width, ranks, r)) for r in range(ranks)]
    return tuple(MlpWeights(torch.cat([gate[s], up[s]]), down[:, s].contiguous()) for s in shares)


def _moe(config: ModelConfig, read: _Reader, ranks: int) -> MoeWeights:
    width = config.moe_intermediate_size

    def stack(matrix: str, kind: str) -> Tensor:
        return torch.stack([read.raw(f"experts.{e}.{matrix}.weight_{kind}") for e in range(config.num_experts)])

    w13 = MXFP4Weight(*(torch.cat([stack("w1", kind), stack("w3", kind)], dim=1) for kind in ("packed", "scale")))
    w2 = MXFP4Weight(stack("w2", "packed"), stack("w2", "scale"))
    shares = [share(width, ranks, r) for r in range(ranks)]
    device = w2.packed.device
    gate_up_rows = [torch.cat([torch.arange(a, b), width + torch.arange(a, b)]).to(device) for a, b in shares]
    return MoeWeights(
        gate=read("gate.weight"),
        bias=read.raw("gate.e_score_correction_bias"),
        down=read("routed_expert_down_proj.weight"),
        norm=read("routed_expert_norm.weight"),
        up=read("routed_expert_up_proj.weight"),
        w13=tuple(w13.rows(index) for index in gate_up_rows),
        w2=tuple(w2.columns(a, b) for a, b in shares),
        shared=_mlp(read.below("shared_experts"), config.shared_intermediate_size, ranks),
    )
