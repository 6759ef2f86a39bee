"""One rank's ops of a decode step in plain torch, for torch.compile: names, shapes and mathematics as in docs/ops.md.

No value is read on the host, products are in BF16, and roundings may be fewer or more than the contract's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS, ROUTER_SUM_EPS


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).bfloat16()


def _situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    saturated = torch.tanh(gate / beta) * torch.sigmoid(gate) * torch.tanh(up / linear_beta)
    return (beta * linear_beta * saturated).bfloat16()


def projection(*, x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight)


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, weight, eps)


def attn_res(
    *,
    prefix: Tensor,
    blocks: Tensor,
    num_blocks: int,
    norm_weight: Tensor,
    query_weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    out_norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    total = prefix if delta is None else prefix + delta
    mix = total.float()
    if num_blocks:
        sources = torch.cat([blocks[:, :num_blocks], total[:, None]], 1).float()
        query = norm_weight.float() * query_weight.float()
        scores = (sources.square().mean(-1) + eps).rsqrt() * (sources * query).sum(-1)
        mix = (scores.softmax(-1)[..., None] * sources).sum(1)
    return total, mix.bfloat16() if out_norm_weight is None else _rms(mix, out_norm_weight, eps)


def output_mix(
    *, y: list[Tensor], weight: list[Tensor], replace_prefix: bool, prefix: Tensor, **mix: Any
) -> tuple[Tensor, Tensor]:
    attention = linear(y[0], weight[0])
    if replace_prefix:
        return attn_res(prefix=attention, **mix)
    return attn_res(prefix=prefix, delta=attention, **mix)


def kda_step(
    *,
    proj: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    heads, d = state.shape[1], state.shape[-1]
    qkv, gate, f_a, beta = proj.split([3 * heads * d, heads * d, d, heads], -1)
    window = torch.cat([conv_state[slots], qkv[..., None]], -1)
    q, k, v = silu((window.float() * conv_weight).sum(-1)).bfloat16().float().unflatten(-1, (3, heads, d)).unbind(1)
    q = q * (q.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt() * d**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()
    g = (linear(f_a, f_b).float() + dt_bias.float()).unflatten(-1, (heads, d))
    decay = (lower_bound * torch.sigmoid(A_log.float().exp()[:, None] * g)).exp()
    S = state[slots] * decay[:, :, None]
    u = (v - (S * k[:, :, None]).sum(-1)) * torch.sigmoid(beta.float())[..., None]
    S = S + u[..., None] * k[:, :, None]
    o = (S * q[:, :, None]).sum(-1).bfloat16().float()
    state[slots] = S
    conv_state[slots] = window[..., 1:]
    normed = o * (o.square().mean(-1, keepdim=True) + O_NORM_EPS).rsqrt() * norm_weight.float()
    y: Tensor = (normed * torch.sigmoid(gate.float().unflatten(-1, (heads, d)))).bfloat16().flatten(1)
    return y


def _e4m3(x: Tensor, scale: float) -> Tensor:
    return (x.float() * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def mla_query(
    *,
    a: Tensor,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    eps: float,
    q_b: Tensor,
    w_uk: Tensor,
    q_scale: float,
    k_scale: float,
    cache: Tensor,
    positions: Tensor,
) -> Tensor:
    heads, nope, rank = w_uk.shape
    q_c, kv_c, k_pe = a.split([a.shape[-1] - cache.shape[-1], rank, cache.shape[-1] - rank], -1)
    latent = torch.cat([_rms(kv_c, kv_norm_weight, eps), k_pe], -1)
    cache.view(-1, cache.shape[-1])[positions] = _e4m3(latent, k_scale)
    q = linear(_rms(q_c, q_norm_weight, eps), q_b).unflatten(-1, (heads, -1))
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    return _e4m3(torch.cat([absorbed, q[..., nope:]], -1), q_scale)


def mla_attend(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    q_scale: float,
    k_scale: float,
    kv_rank: int,
) -> Tensor:
    keys = cache[block_table].view(torch.float8_e4m3fn).bfloat16().flatten(1, 2)
    scores = torch.bmm(q.view(torch.float8_e4m3fn).bfloat16(), keys.transpose(1, 2)).float()
    unseen = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    scores = (scores * (softmax_scale * q_scale * k_scale)).masked_fill(unseen[:, None], -torch.inf)
    return torch.bmm(scores.softmax(-1).bfloat16(), keys[..., :kv_rank]) * k_scale


def mla_value(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
    value = torch.bmm(latent.transpose(0, 1), w_uv).transpose(0, 1).flatten(1)
    return (value.float() * torch.sigmoid(gate.float())).bfloat16()


def moe_front(*, x: Tensor, gate_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    return linear(x, gate_weight).float(), linear(x, down_weight)


def route(*, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + bias, top_k).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + ROUTER_SUM_EPS) * scaling


def _widened(packed: Tensor, scale: Tensor) -> Tensor:
    """BF16 values of MXFP4 codes, by arithmetic: no table has to be copied to the device while a step is captured."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    exponent, half = ((codes >> 1) & 3).float(), (codes & 1).float() * 0.5
    size = torch.where(exponent == 0, half, (1 + half) * torch.exp2(exponent - 1))
    signed = torch.where(codes > 7, -size, size).unflatten(-1, (-1, 32))
    values: Tensor = (signed * torch.exp2(scale.float() - 127)[..., None]).flatten(-2).bfloat16()
    return values


def chosen_experts(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed13: Tensor,
    scale13: Tensor,
    packed2: Tensor,
    scale2: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    pairs, chosen = z.repeat_interleave(ids.shape[1], 0)[..., None], ids.flatten()
    hidden = _situ(torch.bmm(_widened(packed13[chosen], scale13[chosen]), pairs)[..., 0], beta, linear_beta)
    down = _widened(packed2[chosen], scale2[chosen])[..., : hidden.shape[-1]]
    results = torch.bmm(down, hidden[..., None])
    return (results.view(*ids.shape, -1).float() * weights[..., None]).sum(1).bfloat16()


def shared_expert(*, x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    return linear(_situ(linear(x, gate_up), beta, linear_beta), down)


def moe_tail(
    *, latent: list[Tensor], shared: list[Tensor], norm_weight: Tensor, up_weight: Tensor, eps: float
) -> Tensor:
    return linear(_rms(latent[0], norm_weight, eps), up_weight) + shared[0]
