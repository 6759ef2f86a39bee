"""A K3-family text model, top to bottom, over a table of ops.

Which path runs is only a matter of which table is given: the generic one, or the specialised one. Replicated tensors
exist once; what ranks hold apart (attention heads, expert columns, vocabulary rows) is a list with one entry per rank,
joined by the ops that reduce over ranks. Notation and roundings: docs/ops.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode_impl.batch import Batch
from decode_impl.caches import LatentCache, StateCache
from decode_impl.config import ModelConfig
from decode_impl.ops import OpTable
from decode_impl.weights import (
    KdaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
    ResidualWeights,
)


class Residual:
    """The residual stream of a step: the running prefix, the pending output of the last MLP, and the bank of blocks.

    prefix, delta: bf16 [n, H]; blocks: bf16 [n, NB, H]. Lives for one step.
    """

    def __init__(self, embedded: Tensor, blocks: int) -> None:
        self.prefix = embedded
        self.delta: Tensor | None = None
        self.blocks = embedded.new_zeros(embedded.shape[0], blocks, embedded.shape[1])


class Step(NamedTuple):
    """What a step computed: logits f32 [m, vocab] of the wanted rows, and the tapped hidden states bf16 [n, H] each."""

    logits: Tensor
    taps: tuple[Tensor, ...]


def forward(
    weights: ModelWeights,
    ops: OpTable,
    batch: Batch,
    latents: LatentCache,
    states: StateCache,
    taps: Sequence[int] = (),
) -> Step:
    """Run one step. Caches are written in place.

    Tap `i` is the residual *mixture* that enters the attention of layer `i`, of all rows; tap `num_hidden_layers` is
    the mixture behind the last layer.
    """
    config = weights.config
    tapped: dict[int, Tensor] = {}
    residual = Residual(weights.embedding[batch.tokens], config.residual_blocks)
    for index, layer in enumerate(weights.layers):
        x = tapped[index] = _into_attention(config, ops, index, layer.attention_residual, residual)
        if config.is_mla(index):
            heads = _mla(config, ops, index, layer, x, batch, latents)
        else:
            heads = _kda(config, ops, index, layer, x, batch, states)
        x = _into_mlp(config, ops, index, layer, residual, heads)
        residual.delta = _mlp(config, ops, layer, x)
    _, hidden = ops["attn_res"](
        prefix=residual.prefix,
        delta=residual.delta,
        blocks=residual.blocks,
        num_blocks=config.residual_blocks,
        **_residual_arguments(config, weights.final_residual),
    )
    tapped[config.num_hidden_layers] = hidden
    # Pure decode projects its padding too: a matrix product over fewer rows than the bin may give a row other bits.
    pure_decode = not batch.sequences
    hidden = hidden if pure_decode else hidden[batch.logit_rows]
    hidden = ops["rms_norm"](x=hidden, weight=weights.norm, eps=config.rms_norm_eps)
    logits = torch.cat([ops["projection"](x=hidden, weight=part) for part in weights.lm_head], dim=-1).float()
    return Step(logits[batch.logit_rows] if pure_decode else logits, tuple(tapped[i] for i in taps))


def _residual_arguments(config: ModelConfig, weights: ResidualWeights) -> dict[str, Any]:
    return {
        "norm_weight": weights.norm,
        "query_weight": weights.query,
        "eps": config.rms_norm_eps,
        "out_norm_weight": weights.out_norm,
    }


def _started_blocks(config: ModelConfig, index: int) -> int:
    """Blocks that hold something when layer `index` begins."""
    return -(-index // config.attn_res_block_size)


def _into_attention(
    config: ModelConfig, ops: OpTable, index: int, weights: ResidualWeights, residual: Residual
) -> Tensor:
    """Mix in front of attention; the first layer of a block then stores the prefix in the bank."""
    mixed: tuple[Tensor, Tensor] = ops["attn_res"](
        prefix=residual.prefix,
        delta=residual.delta,
        blocks=residual.blocks,
        num_blocks=_started_blocks(config, index),
        **_residual_arguments(config, weights),
    )
    residual.prefix, x = mixed
    if index % config.attn_res_block_size == 0:
        residual.blocks[:, index // config.attn_res_block_size] = residual.prefix
    return x


def _into_mlp(
    config: ModelConfig,
    ops: OpTable,
    index: int,
    layer: LayerWeights,
    residual: Residual,
    heads: list[Tensor],
) -> Tensor:
    """Output projection and the mix in front of the MLP; the first layer of a block starts its prefix anew."""
    writes_block = index % config.attn_res_block_size == 0
    mixed: tuple[Tensor, Tensor] = ops["output_mix"](
        y=heads,
        weight=[rank.o_proj for rank in layer.attention],
        replace_prefix=writes_block,
        prefix=residual.prefix,
        blocks=residual.blocks,
        num_blocks=_started_blocks(config, index) + writes_block,
        **_residual_arguments(config, layer.mlp_residual),
    )
    residual.prefix = mixed[0]
    return mixed[1]


def _kda(
    config: ModelConfig,
    ops: OpTable,
    index: int,
    layer: LayerWeights,
    x: Tensor,
    batch: Batch,
    states: StateCache,
) -> list[Tensor]:
    """Every rank's gated KDA output, bf16 [n, D_r]."""
    outputs = []
    for rank, w in enumerate(layer.attention):
        assert isinstance(w, KdaWeights)
        if not w.heads:
            outputs.append(x.new_zeros(x.shape[0], 0))
            continue
        proj = ops["projection"](x=x, weight=w.in_proj)
        arguments = {
            "f_b": w.f_b,
            "conv_weight": w.conv,
            "A_log": w.A_log,
            "dt_bias": w.dt_bias,
            "lower_bound": config.gate_lower_bound,
            "norm_weight": w.norm,
            "conv_state": states.conv[index, rank],
            "state": states.state[index, rank],
        }
        parts = []
        if batch.decode_rows:
            parts.append(ops["kda_step"](proj=proj[: batch.decode_rows], slots=batch.slots, **arguments))
        for verify in batch.verify:
            parts.append(
                ops["kda_verify"](proj=proj[verify.rows], sources=verify.sources, targets=verify.targets, **arguments)
            )
        for rows in batch.sequences:
            parts.append(ops["kda_sequence"](proj=proj[rows.rows], slot=rows.slot, **arguments))
        outputs.append(_joined(parts))
    return outputs


def _mla(
    config: ModelConfig,
    ops: OpTable,
    index: int,
    layer: LayerWeights,
    x: Tensor,
    batch: Batch,
    latents: LatentCache,
) -> list[Tensor]:
    """Every rank's gated MLA output, bf16 [n, h_r * v]."""
    q_scale, k_scale = latents.scales[index]
    shared = {"softmax_scale": config.mla_scale, "q_scale": q_scale, "k_scale": k_scale, "kv_rank": config.kv_lora_rank}
    queries, gates = [], []
    for rank, w in enumerate(layer.attention):
        assert isinstance(w, MlaWeights)
        if not w.heads and not latents.sharded:
            queries.append(x.new_zeros(x.shape[0], 0))
            gates.append(queries[-1])
            continue
        # With context parallelism a rank without heads still holds its share of the context.
        a = ops["projection"](x=x, weight=w.a_proj)
        inputs, gate = a.split(
            [config.q_lora_rank + config.latent_row, a.shape[1] - config.q_lora_rank - config.latent_row], 1
        )
        q = ops["mla_query"](
            a=inputs,
            q_norm_weight=w.q_norm,
            kv_norm_weight=w.kv_norm,
            eps=config.rms_norm_eps,
            q_b=w.q_b,
            w_uk=w.w_uk,
            q_scale=q_scale,
            k_scale=k_scale,
            cache=latents.shards[rank if latents.sharded else 0][index],
            positions=latents.written_by(rank, batch.positions),
        )
        queries.append(q)
        gates.append(gate)
    attend = _attend_sharded if latents.sharded else _attend_replicated
    attended = attend(ops, index, queries, batch, latents, shared)
    return [
        ops["mla_value"](latent=latent, w_uv=w.w_uv, gate=gate) if isinstance(w, MlaWeights) and w.heads else x[:, :0]
        for w, latent, gate in zip(layer.attention, attended, gates, strict=True)
    ]


def _attend_replicated(
    ops: OpTable, index: int, queries: list[Tensor], batch: Batch, latents: LatentCache, shared: dict[str, Any]
) -> list[Tensor]:
    """Every rank's heads over whole contexts, bf16 [n, h_r, C]."""
    shared = {**shared, "cache": latents.layers[index]}
    return [_joined(list(_attend(ops, q, batch, shared))) if q.shape[1] else q for q in queries]


def _attend_sharded(
    ops: OpTable, index: int, queries: list[Tensor], batch: Batch, latents: LatentCache, shared: dict[str, Any]
) -> list[Tensor]:
    """The heads of all ranks over every rank's share of the contexts, bf16 [n, h_r, C] to the ranks that own them.

    Longer chunks attend to their context's rows gathered from all ranks: those are what one rank would have.
    """
    q = torch.cat(queries, 1)
    parts = []
    if batch.attend_rows:
        parts.append(
            ops["mla_attend_dcp"](
                q=q[: batch.attend_rows],
                cache=[own[index] for own in latents.shards],
                block_table=batch.block_table,
                lengths=batch.lengths,
                **shared,
            )
        )
    for rows in batch.sequences:
        whole = {
            "cache": latents.gathered(index, rows.block_table)[None],
            "block_table": torch.zeros_like(rows.block_table[:1]),
        }
        parts.append(ops["mla_attend_sequence"](q=q[rows.rows], start=rows.start, **whole, **shared))
    return list(_joined(parts).split([own.shape[1] for own in queries], 1))


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows behind rows; the most frequent step has one part, which is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(ops: OpTable, q: Tensor, batch: Batch, shared: dict[str, Any]) -> Iterator[Tensor]:
    if batch.attend_rows:
        yield ops["mla_attend"](
            q=q[: batch.attend_rows], block_table=batch.block_table, lengths=batch.lengths, **shared
        )
    for rows in batch.sequences:
        yield ops["mla_attend_sequence"](q=q[rows.rows], block_table=rows.block_table, start=rows.start, **shared)


def _mlp(config: ModelConfig, ops: OpTable, layer: LayerWeights, x: Tensor) -> Tensor:
    """The dense MLP or the latent MoE, reduced over ranks: bf16 [n, H]."""
    activation = {"beta": config.situ_beta, "linear_beta": config.situ_linear_beta}
    w = layer.mlp
    if not isinstance(w, MoeWeights):
        dense: Tensor = ops["all_reduce"](
            y=[ops["shared_expert"](x=x, gate_up=rank.gate_up, down=rank.down, **activation) for rank in w]
        )
        return dense
    logits, z = ops["moe_front"](x=x, gate_weight=w.gate, down_weight=w.down)
    ids, scores = ops["route"](
        logits=logits, bias=w.bias, top_k=config.experts_per_token, scaling=config.routed_scaling_factor
    )
    routed = [
        ops["experts"](z=z, ids=ids, weights=scores, w13=w13, w2=w2, **activation)
        for w13, w2 in zip(w.w13, w.w2, strict=True)
    ]
    shared = [ops["shared_expert"](x=x, gate_up=rank.gate_up, down=rank.down, **activation) for rank in w.shared]
    delta: Tensor = ops["moe_tail"](
        latent=routed, shared=shared, norm_weight=w.norm, up_weight=w.up, eps=config.rms_norm_eps
    )
    return delta
