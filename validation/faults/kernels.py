"""Whole kernels, plain and with a hook at every place where a fault may sit. Used where an op has no part to replace.

They follow docs/ops.md and share no code with the ops that they stand in for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16, e4m3_decode


def widened(stored: Tensor) -> Tensor:
    """Stored elements as f32, without their scale."""
    return e4m3_decode(stored) if stored.dtype == torch.uint8 else stored.float()


def gathered(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys f32 [n, L, row] of every row's pages, and which of them the row sees, bool [n, L]."""
    cache, lengths = case["cache"], case["lengths"]
    pages = max(1, -(-int(lengths.max()) // cache.shape[1]))
    keys = widened(cache[case["block_table"][:, :pages]]).flatten(1, 2)
    return keys, torch.arange(keys.shape[1]) < lengths[:, None]


def attend(
    case: dict[str, Any],
    *,
    seen: Tensor | None = None,
    keys: Tensor | None = None,
    softmax: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
    zero_values: bool = True,
) -> Tensor:
    """Decode attention over `gathered` keys, bf16 [n, h, C]; `zero_values` removes the values of unseen keys."""
    own_keys, own_seen = gathered(case)
    keys, seen = own_keys if keys is None else keys, own_seen if seen is None else seen
    fp8 = case["cache"].dtype == torch.uint8
    scale = case["softmax_scale"] * (case["q_scale"] * case["k_scale"] if fp8 else 1.0)
    scores = (widened(case["q"]) @ keys.transpose(-1, -2) * scale).masked_fill(~seen[:, None], -torch.inf)
    weights = softmax(scores)
    values = keys[..., : case["kv_rank"]]
    values = values.masked_fill(~seen[..., None], 0.0) if zero_values else values
    latent = bf16(weights @ values * (case["k_scale"] if fp8 else 1.0))
    empty: Tensor = case["lengths"] == 0
    return latent.masked_fill(empty[:, None, None], 0.0)


def kda_step(case: dict[str, Any], *, l2_eps: float = 1e-6, norm_eps: float = 1e-5, inner: Any) -> Tensor:
    """One token of every row, written out plainly; `inner` is the recurrence. Returns bf16 [n, D], writes the pools."""
    proj, state, conv_state, slots = case["proj"], case["state"], case["conv_state"], case["slots"]
    h, d = state.shape[1], state.shape[-1]
    live = slots.nonzero().squeeze(-1)
    owned = slots[live]
    qkv, gate, f_a, beta = proj[live].split([3 * h * d, h * d, d, h], -1)
    window = torch.cat([conv_state[owned], qkv[..., None]], -1)
    conv_state[owned] = window[..., 1:]
    conv = (window.float() * case["conv_weight"]).sum(-1)
    q, k, v = (conv * torch.sigmoid(conv)).view(-1, 3, h, d).unbind(1)
    q, k = (x * (x.square().sum(-1, keepdim=True) + l2_eps).rsqrt() for x in (q, k))
    g = bf16(f_a.float() @ case["f_b"].float().T).float() + case["dt_bias"]
    log_decay = case["lower_bound"] * torch.sigmoid(case["A_log"].exp()[:, None] * g.view(-1, h, d))
    S, o = inner(state[owned].float(), q * d**-0.5, k, v, log_decay.exp(), torch.sigmoid(beta.float()))
    state[owned] = S.to(state.dtype)
    normed = o * (o.square().mean(-1, keepdim=True) + norm_eps).rsqrt() * case["norm_weight"].float()
    y: Tensor = proj.new_zeros(proj.shape[0], h * d)
    y[live] = bf16(normed * torch.sigmoid(gate.float()).view_as(o)).flatten(1)
    return y


def kda_sequence(
    case: dict[str, Any], *, solve: Callable[[Tensor, Tensor], Tensor], last_decay: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """T tokens of one request in chunks of 16 (WY form). `solve(A, b)`: x of (I + A) x = b, A strictly lower.

    `last_decay` picks a chunk's total decay out of those of all chunks so far. Returns bf16 [T, D], writes the pools.
    """
    proj, slot, state, conv_state = case["proj"], case["slot"], case["state"], case["conv_state"]
    h, d = state.shape[1], state.shape[-1]
    qkv, gate, f_a, beta = proj.split([3 * h * d, h * d, d, h], -1)
    history = torch.cat([conv_state[slot].T, qkv])
    conv_state[slot] = history[-3:].T
    conv = bf16(torch.nn.functional.silu((history.float().unfold(0, 4, 1) * case["conv_weight"]).sum(-1))).float()
    q, k, v = conv.view(-1, 3, h, d).unbind(1)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = bf16(f_a.float() @ case["f_b"].float().T).float() + case["dt_bias"]
    log_decay = case["lower_bound"] * torch.sigmoid(case["A_log"].exp()[:, None] * g.view(-1, h, d))
    S, outputs, totals = state[slot].float(), [], []
    tokens = (q * d**-0.5, k, v, log_decay, torch.sigmoid(beta.float()))
    for start in range(0, proj.shape[0], 16):
        q, k, v, log, b = (x[start : start + 16].transpose(0, 1) for x in tokens)
        G = log.cumsum(1)
        future = torch.ones(G.shape[1], G.shape[1], dtype=torch.bool).triu(1)
        decay = (G[:, :, None] - G[:, None]).masked_fill(future[..., None], 0.0).exp()
        A = torch.einsum("htd,hjd,htjd->htj", k, k, decay).tril(-1) * b[..., None]
        U = solve(A, b[..., None] * (v - (k * G.exp()) @ S.mT))
        outputs.append((q * G.exp()) @ S.mT + torch.einsum("htd,hjd,htjd->htj", q, k, decay).tril() @ U)
        totals.append(G[:, -1].exp())
        S = S * last_decay(totals)[:, None] + U.mT @ (k * decay[:, -1])
    state[slot] = S.to(state.dtype)
    o = bf16(torch.cat(outputs, 1).transpose(0, 1)).float()
    normed = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * case["norm_weight"].float()
    return bf16(normed * torch.sigmoid(gate.float()).view_as(o)).flatten(1)
