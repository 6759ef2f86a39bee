"""The K3 text model as a differentiable module: docs/ops.md with BF16 activations and FP32 masters.

Weights that one op reads together are one parameter here (`in_proj`, `a_proj`, `gate_up`, `w13`); `export.py`
splits them into upstream's names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS, ROUTER_SUM_EPS, ModelConfig
from decode_impl.training.delta_rule import CHUNK, chunked_delta_rule
from decode_impl.training.quantise import fake_e4m3, fake_mxfp4

DeltaInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The delta rule's q, k, v, log decay [B,T,h,d] and beta [B,T,h], all FP32."""


@dataclass
class Precision:
    """Which formats a forward imitates.

    `compute` is the dtype of activations and dense weights; `fp8_rows` is the share of the batch's rows, from the
    first, whose latent rows pass through E4M3.
    """

    compute: torch.dtype = torch.bfloat16
    mxfp4_experts: bool = True
    fp8_rows: float = 0.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in FP32, one rounding to the dtype of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """K3's gated activation in FP32, rounded to the inputs' dtype."""
    g, u = gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)


def attn_res(
    sources: Tensor, norm_weight: Tensor, query_weight: Tensor, eps: float, out_norm_weight: Tensor | None
) -> Tensor:
    """Softmax mix of `sources` [S,...,H] (blocks, then prefix) by their normalised score, then the output norm."""
    wide = sources.float()
    scores = (wide * (norm_weight * query_weight)).sum(-1) * torch.rsqrt(wide.square().mean(-1) + eps)
    mixed = (scores.softmax(0).unsqueeze(-1) * wide).sum(0)
    if out_norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps) * out_norm_weight
    return mixed.to(sources.dtype)


def kda_inputs(
    conv_in: Tensor,
    conv_weight: Tensor,
    gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta: Tensor,
    dim: int,
    bound: float,
) -> DeltaInputs:
    """From projections to what the delta rule reads.

    conv_in [B,T,3D] (q, k, v), conv_weight [3D,taps] oldest first, gate [B,T,D] before A_log and dt_bias.
    """
    length, taps = conv_in.shape[1], conv_weight.shape[-1]
    padded = F.pad(conv_in, (0, 0, taps - 1, 0)).float()
    mixed = sum(
        (padded[:, j : j + length] * conv_weight[:, j] for j in range(taps)),
        torch.zeros((), device=padded.device),
    )
    q, k, v = F.silu(mixed).to(conv_in.dtype).float().unflatten(-1, (3, -1, dim)).unbind(2)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_NORM_EPS) * dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_NORM_EPS)
    raw = (gate.float() + dt_bias).unflatten(-1, (-1, dim))
    return q, k, v, bound * torch.sigmoid(A_log.exp().unsqueeze(-1) * raw), torch.sigmoid(beta.float())


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """KDA's output norm per head of o [B,T,h,d], with a sigmoid gate [B,T,D] whose shape and dtype it returns."""
    scaled = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + O_NORM_EPS) * weight
    return (scaled.flatten(-2) * torch.sigmoid(gate.float())).to(gate.dtype)


def expert_mix(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Sigmoid routing as dense weights [...,E], zero but for the top_k of `score + bias`, and the selection [...,E]."""
    scores = torch.sigmoid(logits)
    biased = (scores + bias).detach()
    # Selected is who has fewer than top_k better ones; a tie goes to the lower id. (A sort per row is far slower.)
    mine, other = biased.unsqueeze(-1), biased.unsqueeze(-2)
    ids = torch.arange(biased.shape[-1], device=biased.device)
    better = (other > mine) | ((other == mine) & (ids < ids[:, None]))
    selected = (better.sum(-1) < top_k).to(scores.dtype)
    kept = scores * selected
    return kept / (kept.sum(-1, keepdim=True) + ROUTER_SUM_EPS) * scaling, selected


def expert_hidden(gate_up: Tensor, weights: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Weighted SiTU of all experts side by side: gate_up [...,E,2,I], weights [...,E]; returns [...,E*I]."""
    hidden = situ(gate_up[..., 0, :], gate_up[..., 1, :], beta, linear_beta)
    return (hidden * weights.to(hidden.dtype).unsqueeze(-1)).flatten(-2)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class KDA(nn.Module):
    """Kimi Delta Attention of one layer."""

    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        size, dim, heads = config.kda_size, config.kda_head_dim, config.kda_heads
        self.sizes = (3 * size, size, dim, heads)
        self.dim, self.bound = dim, config.gate_lower_bound
        self.in_proj = _matrix(sum(self.sizes), config.hidden_size)  # rows q, k, v, g, f_a, beta
        self.f_b_proj = _matrix(size, dim, 0.3)
        taps = torch.tensor([0.1] * (config.conv_kernel - 1) + [0.8])
        self.conv = nn.Parameter(taps + 0.1 * torch.randn(3 * size, config.conv_kernel))
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Half-lives from about one token to about two thousand, spread over the channels of every head.
        rate = torch.logspace(math.log10(3e-4), math.log10(0.5), dim) / -self.bound
        self.dt_bias = nn.Parameter(torch.logit(rate).repeat(heads))
        self.o_norm = _ones(dim)
        self.o_proj = _matrix(config.hidden_size, size, out_gain)

    def delta_inputs(self, x: Tensor, precision: Precision) -> tuple[DeltaInputs, Tensor]:
        """What the delta rule reads, and the output gate [B,T,D]."""
        dtype = precision.compute
        qkv, gate, f_a, beta = F.linear(x, self.in_proj.to(dtype)).split(self.sizes, -1)
        decay_gate = F.linear(f_a, self.f_b_proj.to(dtype))
        conv = self.conv.to(dtype).float()  # stored in BF16
        return kda_inputs(qkv, conv, decay_gate, self.A_log, self.dt_bias, beta, self.dim, self.bound), gate

    def forward(self, x: Tensor, precision: Precision) -> Tensor:
        inputs, gate = self.delta_inputs(x, precision)
        o = chunked_delta_rule(*inputs)
        dtype = precision.compute
        return F.linear(gated_norm(o, self.o_norm.to(dtype), gate), self.o_proj.to(dtype))


class MLA(nn.Module):
    """Multi-head latent attention without rotation, in its expanded form, with an output gate."""

    k_scale: Tensor
    q_scale: Tensor

    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        self.config = config
        heads, values = config.mla_heads, config.mla_heads * config.v_head_dim
        self.sizes = (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim, values)
        self.a_proj = _matrix(sum(self.sizes), config.hidden_size)  # rows q_a, kv_a, k_pe, gate
        self.q_a_layernorm, self.kv_a_layernorm = _ones(config.q_lora_rank), _ones(config.kv_lora_rank)
        self.q_b_proj = _matrix(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank)
        self.kv_b_proj = _matrix(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        self.o_proj = _matrix(config.hidden_size, values, out_gain)
        self.register_buffer("k_scale", torch.tensor(0.037))
        self.register_buffer("q_scale", torch.tensor(0.037))
        self.last_row: Tensor | None = None
        self.last_query: Tensor | None = None

    def forward(self, x: Tensor, precision: Precision) -> Tensor:
        config, dtype = self.config, precision.compute
        batch, length, _ = x.shape
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        q_c, kv_c, k_pe, gate = F.linear(x, self.a_proj.to(dtype)).split(self.sizes, -1)
        q_n = rms_norm(q_c, self.q_a_layernorm.to(dtype), config.rms_norm_eps)
        kv_n = rms_norm(kv_c, self.kv_a_layernorm.to(dtype), config.rms_norm_eps)
        if not torch.is_grad_enabled():
            self.last_row = torch.cat([kv_n, k_pe], -1)
        if quantised := round(precision.fp8_rows * batch):
            kv_n, k_pe = (torch.cat([fake_e4m3(x[:quantised], self.k_scale), x[quantised:]]) for x in (kv_n, k_pe))
        q = F.linear(q_n, self.q_b_proj.to(dtype)).view(batch, length, config.mla_heads, nope + rope)
        kv_b = self.kv_b_proj.to(dtype)
        if not torch.is_grad_enabled():
            self.last_query = self._absorbed(q, kv_b)
        kv = F.linear(kv_n, kv_b).view(batch, length, config.mla_heads, -1)
        k = torch.cat([kv[..., :nope], k_pe.unsqueeze(2).expand(-1, -1, config.mla_heads, -1)], -1)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            kv[..., nope:].transpose(1, 2),
            is_causal=True,
            scale=config.mla_scale,
        ).transpose(1, 2)
        y = (o.flatten(2).float() * torch.sigmoid(gate.float())).to(dtype)
        return F.linear(y, self.o_proj.to(dtype))

    def _absorbed(self, q: Tensor, kv_b: Tensor) -> Tensor:
        """The query row that a latent cache is read with: `[q_nope @ W_UK | q_rope]`."""
        nope = self.config.qk_nope_head_dim
        w_uk = kv_b.view(self.config.mla_heads, -1, self.config.kv_lora_rank)[:, :nope]
        return torch.cat([torch.einsum("bthn,hnc->bthc", q[..., :nope], w_uk), q[..., nope:]], -1)


class MLP(nn.Module):
    """Gated MLP with SiTU: the dense layer and the shared expert."""

    def __init__(self, config: ModelConfig, width: int, out_gain: float) -> None:
        super().__init__()
        self.betas = (config.situ_beta, config.situ_linear_beta)
        self.gate_up = _matrix(2 * width, config.hidden_size)
        self.down_proj = _matrix(config.hidden_size, width, out_gain)

    def forward(self, x: Tensor, precision: Precision) -> Tensor:
        gate, up = F.linear(x, self.gate_up.to(precision.compute)).chunk(2, -1)
        return F.linear(situ(gate, up, *self.betas), self.down_proj.to(precision.compute))


class LatentMoE(nn.Module):
    """Routed experts in a latent space beside a shared expert.

    All experts run on all tokens: they are tiny, and so every shape is fixed.
    """

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, out_gain: float) -> None:
        super().__init__()
        self.config = config
        experts, width, latent = config.num_experts, config.moe_intermediate_size, config.latent_size
        self.gate = _matrix(experts, config.hidden_size)
        self.w13 = nn.Parameter(torch.randn(experts, 2 * width, latent) / math.sqrt(latent))
        self.w2 = nn.Parameter(torch.randn(experts, latent, width) / math.sqrt(width))
        self.down = _matrix(latent, config.hidden_size)
        self.norm = _ones(latent)
        self.up = _matrix(config.hidden_size, latent, out_gain)
        self.shared_experts = MLP(config, config.shared_intermediate_size, out_gain)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor, precision: Precision) -> Tensor:
        config, dtype = self.config, precision.compute
        logits = F.linear(x.float(), self.gate.to(dtype).float())
        weights, selected = expert_mix(
            logits, self.e_score_correction_bias, config.experts_per_token, config.routed_scaling_factor
        )
        if self.training:
            with torch.no_grad():
                self.load += selected.flatten(0, -2).mean(0)
        w13, w2 = (fake_mxfp4(w) if precision.mxfp4_experts else w for w in (self.w13, self.w2))
        z = F.linear(x, self.down.to(dtype))
        gate_up = F.linear(z, w13.to(dtype).flatten(0, 1)).unflatten(-1, (config.num_experts, 2, -1))
        hidden = expert_hidden(gate_up, weights, config.situ_beta, config.situ_linear_beta)
        latent = F.linear(hidden, w2.to(dtype).transpose(0, 1).flatten(1))
        routed = F.linear(rms_norm(latent, self.norm.to(dtype), config.rms_norm_eps), self.up.to(dtype))
        return routed + cast(Tensor, self.shared_experts(x, precision))

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """One step of load balancing: the selection bias of an over-used expert falls by `rate`, else it rises."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.e_score_correction_bias -= self.e_score_correction_bias.mean()
        self.load.zero_()


class Mixer(nn.Module):
    """Weights of one attention-residual mix: the key norm, the query and (inside a layer) the output norm."""

    def __init__(self, config: ModelConfig, out_norm: bool) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm = _ones(config.hidden_size)
        self.proj = nn.Parameter(torch.zeros(config.hidden_size))
        self.out_norm = _ones(config.hidden_size) if out_norm else None

    def forward(self, prefix: Tensor, blocks: list[Tensor], precision: Precision) -> Tensor:
        dtype = precision.compute
        out_norm = None if self.out_norm is None else self.out_norm.to(dtype)
        if not blocks:
            return prefix if out_norm is None else rms_norm(prefix, out_norm, self.eps)
        sources = torch.stack([*blocks, prefix])
        return attn_res(sources, self.norm.to(dtype).float(), self.proj.to(dtype).float(), self.eps, out_norm)


class Layer(nn.Module):
    """One decoder layer: an attention and an MLP, each behind its attention-residual mix."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        gain = 1.0 / math.sqrt(2 * config.num_hidden_layers)
        self.attention_mix, self.mlp_mix = Mixer(config, True), Mixer(config, True)
        self.self_attn: KDA | MLA = MLA(config, gain) if config.is_mla(index) else KDA(config, gain)
        self.mlp: MLP | LatentMoE = (
            MLP(config, config.intermediate_size, gain) if config.is_dense(index) else LatentMoE(config, gain)
        )
        self.writes_block = index % config.attn_res_block_size == 0

    def forward(self, prefix: Tensor, blocks: list[Tensor], precision: Precision) -> tuple[Tensor, list[Tensor]]:
        attended = self.self_attn(self.attention_mix(prefix, blocks, precision), precision)
        if self.writes_block:
            blocks, prefix = [*blocks, prefix], attended
        else:
            prefix = prefix + attended
        return prefix + self.mlp(self.mlp_mix(prefix, blocks, precision), precision), blocks


class K3Text(nn.Module):
    """The whole text backbone. `forward` maps tokens i64 [B,T] to logits [B,T,V] in the compute dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.output_mix = Mixer(config, False)
        self.norm = _ones(config.hidden_size)
        self.lm_head = _matrix(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor, precision: Precision | None = None) -> Tensor:
        precision = precision or Precision()
        dtype, length = precision.compute, tokens.shape[1]
        tokens = F.pad(tokens, (0, -length % CHUNK), value=self.config.pad_token_id)
        prefix, blocks = F.embedding(tokens, self.embed_tokens.to(dtype)), cast(list[Tensor], [])
        for layer in self.layers:
            prefix, blocks = layer(prefix, blocks, precision)
        mixed = self.output_mix(prefix, blocks, precision)
        normed = rms_norm(mixed, self.norm.to(dtype), self.config.rms_norm_eps)
        return F.linear(normed, self.lm_head.to(dtype))[:, :length]

    def moe_layers(self) -> list[LatentMoE]:
        """The MoE of every layer that has one."""
        return [m for m in self.modules() if isinstance(m, LatentMoE)]

    def mla_layers(self) -> list[MLA]:
        """The MLA of every full-attention layer."""
        return [m for m in self.modules() if isinstance(m, MLA)]
