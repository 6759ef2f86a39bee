"""Op by op: our generic ops on the very inputs that vLLM's modules saw.

An op that is given the input that vLLM had can differ by its own roundings only, so its row says what it adds; where
they add up, `diverge` shows. Both read the file that `probe` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_impl import generic
from decode_impl.checkpoint import load_checkpoint
from decode_impl.config import ModelConfig
from decode_impl.ops import OpTable
from decode_impl.weights import KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights, shard_weights
from numerics.formats import bf16

BF16_ROUNDING = 2.0**-7 / math.sqrt(24)
"""Relative RMS of one rounding to BF16: an error uniform in half a step either way has RMS 2^-7 / sqrt(12) of the power
of two below the number, and the mean of 1/x^2 over [1, 2) is a half."""

PAGE = 16


@dataclass(frozen=True)
class OpRow:
    """One op of one layer on vLLM's own inputs: share of elements equal bit for bit, relative RMS of the difference."""

    op: str
    layer: int
    equal: float
    relative_rms: float

    @property
    def roundings(self) -> float:
        """The difference in units of one BF16 rounding."""
        return self.relative_rms / BF16_ROUNDING


def relative_rms(reference: Tensor, other: Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite for a difference from zeros."""
    size, difference = reference.double().norm(), (other.double() - reference.double()).norm()
    return float(difference / size) if size else (math.inf if difference else 0.0)


def explain(folder: Path, seen: Mapping[str, Tensor], prompt_length: int, ops: OpTable = generic.OPS) -> list[OpRow]:
    """Every op of the table on vLLM's own inputs, compared on the decode rows: those from `prompt_length` on."""
    checkpoint = load_checkpoint(folder)
    weights = shard_weights(checkpoint.config, checkpoint.tensors)
    rows = []
    with torch.inference_mode():
        for op, layer, ours in _recomputed(weights, seen, ops):
            theirs = seen[AT_THE_END.get(op) or f"layers.{layer}.{_KEPT[op]}"]
            # What only a step's last row goes through was seen once for the prefill.
            decode = slice(1 if op in AT_THE_END else prompt_length, None)
            ours, theirs = ours[decode], theirs[decode, : ours.shape[1]]
            equal = float((ours.to(theirs.dtype) == theirs).double().mean())
            rows.append(OpRow(op, layer, equal, relative_rms(theirs, ours)))
    return rows


AT_THE_END = {"attn_res behind the layers": "final_mix", "rms_norm": "head_in", "lm_head": "logits"}
"""Ops behind the layers, and the tensor of the probe that is their output."""

_KEPT = {
    "attn_res before attention": "attn_in",
    "projection q k v g f_a beta": "proj",
    "kda_step": "heads",
    "mla (projection to gated values)": "heads",
    "o_proj": "attn_out",
    "attn_res before the MLP": "mlp_in",
    "dense MLP": "mlp_out",
    "moe_front: router": "router",
    "moe_front: latent": "latent_in",
    "route and experts": "latent_sum",
    "shared_expert": "shared",
    "moe_tail": "mlp_out",
}
"""Our op, and the tensor of the probe that is its output."""


def _recomputed(weights: ModelWeights, seen: Mapping[str, Tensor], ops: OpTable) -> Iterator[tuple[str, int, Tensor]]:
    """(op, layer, our output on vLLM's inputs) for all that the probe kept."""
    config = weights.config
    for index, layer in enumerate(weights.layers):
        kept = {name.split(".", 2)[2]: t for name, t in seen.items() if name.startswith(f"layers.{index}.")}
        yield from ((op, index, output) for op, output in _layer(config, ops, index, layer, kept))
    rows = seen["final_mix"].shape[0]
    prefix, blocks, _ = _attention_residual(config, index, layer, kept)
    if index % config.attn_res_block_size == 0:
        prefix = kept["attn_out"]
    else:
        prefix = bf16(prefix.float() + kept["attn_out"].float())
    end = {"prefix": prefix, "delta": kept["mlp_out"], "blocks": blocks, "num_blocks": config.residual_blocks}
    _, mixed = ops["attn_res"](**end, **_mix(config, weights.final_residual))
    yield "attn_res behind the layers", index + 1, mixed[-rows:]
    yield "rms_norm", index + 1, ops["rms_norm"](x=seen["final_mix"], weight=weights.norm, eps=config.rms_norm_eps)
    yield "lm_head", index + 1, ops["projection"](x=seen["head_in"], weight=weights.lm_head[0])


def _attention_residual(
    config: ModelConfig, index: int, layer: LayerWeights, kept: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix and blocks behind a layer's first mix, and the mix."""
    blocks, started = kept["blocks"], -(-index // config.attn_res_block_size)
    given = {"prefix": kept["prefix"], "delta": kept.get("delta"), "blocks": blocks, "num_blocks": started}
    prefix, mixed = generic.OPS["attn_res"](**given, **_mix(config, layer.attention_residual))
    if index % config.attn_res_block_size == 0:
        blocks = blocks.clone()
        blocks[:, index // config.attn_res_block_size] = prefix
    return prefix, blocks, mixed


def _layer(
    config: ModelConfig, ops: OpTable, index: int, layer: LayerWeights, kept: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    w = layer.attention[0]
    writes = index % config.attn_res_block_size == 0
    prefix, blocks, mixed = _attention_residual(config, index, layer, kept)
    yield "attn_res before attention", mixed
    if isinstance(w, KdaWeights):
        yield "projection q k v g f_a beta", ops["projection"](x=kept["attn_in"], weight=w.in_proj)
        yield "kda_step", _kda(config, w, kept["proj"])
    else:
        yield "mla (projection to gated values)", _mla(config, ops, w, kept["attn_in"])
    yield "o_proj", ops["projection"](x=kept["heads"], weight=w.o_proj)
    _, mixed = ops["attn_res"](
        prefix=kept["attn_out"] if writes else prefix,
        delta=None if writes else kept["attn_out"],
        blocks=blocks,
        num_blocks=-(-index // config.attn_res_block_size) + writes,
        **_mix(config, layer.mlp_residual),
    )
    yield "attn_res before the MLP", mixed
    yield from _mlp(config, ops, layer, kept)


def _mix(config: ModelConfig, residual: Any) -> dict[str, Any]:
    return {
        "norm_weight": residual.norm,
        "query_weight": residual.query,
        "out_norm_weight": residual.out_norm,
        "eps": config.rms_norm_eps,
    }


def _kda(config: ModelConfig, w: KdaWeights, proj: Tensor) -> Tensor:
    """The recurrence token by token over vLLM's projection rows, its padding columns cut off."""
    size, d = w.heads * config.kda_head_dim, config.kda_head_dim
    conv = torch.zeros(2, 3 * size, config.conv_kernel - 1, dtype=torch.bfloat16)
    state = torch.zeros(2, w.heads, d, d)
    arguments = {"f_b": w.f_b, "conv_weight": w.conv, "A_log": w.A_log, "dt_bias": w.dt_bias, "norm_weight": w.norm}
    rows = proj[:, : 4 * size + d + w.heads].split(1)
    slot = torch.ones(1, dtype=torch.int64)
    step = generic.OPS["kda_step"]
    kept = {"conv_state": conv, "state": state, "slots": slot, "lower_bound": config.gate_lower_bound}
    return torch.cat([step(proj=row, **arguments, **kept) for row in rows])


def _mla(config: ModelConfig, ops: OpTable, w: MlaWeights, x: Tensor) -> Tensor:
    """All of one MLA layer up to its gated values, every row seeing the rows before it and itself."""
    length = x.shape[0]
    pages = -(-length // PAGE)
    cache = torch.zeros(pages + 1, PAGE, config.latent_row, dtype=torch.bfloat16)
    a = ops["projection"](x=x, weight=w.a_proj)
    inputs, gate = a.tensor_split([config.q_lora_rank + config.latent_row], dim=1)
    q = ops["mla_query"](
        a=inputs,
        q_norm_weight=w.q_norm,
        kv_norm_weight=w.kv_norm,
        eps=config.rms_norm_eps,
        q_b=w.q_b,
        w_uk=w.w_uk,
        q_scale=1.0,
        k_scale=1.0,
        cache=cache,
        positions=torch.arange(PAGE, PAGE + length),
    )
    latent = ops["mla_attend"](
        q=q,
        cache=cache,
        block_table=torch.arange(1, pages + 1).expand(length, -1),
        lengths=torch.arange(1, length + 1),
        softmax_scale=config.mla_scale,
        q_scale=1.0,
        k_scale=1.0,
        kv_rank=config.kv_lora_rank,
    )
    value: Tensor = ops["mla_value"](latent=latent, w_uv=w.w_uv, gate=gate)
    return value


def _mlp(
    config: ModelConfig, ops: OpTable, layer: LayerWeights, kept: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    w, x = layer.mlp, kept["mlp_in"]
    activation = {"beta": config.situ_beta, "linear_beta": config.situ_linear_beta}
    if not isinstance(w, MoeWeights):
        yield "dense MLP", ops["shared_expert"](x=x, gate_up=w[0].gate_up, down=w[0].down, **activation)
        return
    logits, z = ops["moe_front"](x=x, gate_weight=w.gate, down_weight=w.down)
    yield "moe_front: router", logits
    yield "moe_front: latent", z
    ids, scores = ops["route"](
        logits=kept["router"].float(), bias=w.bias, top_k=config.experts_per_token, scaling=config.routed_scaling_factor
    )
    chosen = {"ids": ids, "weights": scores, "w13": w.w13[0], "w2": w.w2[0]}
    yield "route and experts", ops["experts"](z=kept["latent_in"], **chosen, **activation)
    yield "shared_expert", ops["shared_expert"](x=x, gate_up=w.shared[0].gate_up, down=w.shared[0].down, **activation)
    yield (
        "moe_tail",
        ops["moe_tail"](
            latent=[kept["latent_sum"]],
            shared=[kept["shared"]],
            norm_weight=w.norm,
            up_weight=w.up,
            eps=config.rms_norm_eps,
        ),
    )
