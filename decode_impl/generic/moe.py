"""Latent mixture of experts of the generic path: front, router, MXFP4 experts, shared expert, tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_impl.config import ROUTER_SUM_EPS
from decode_impl.generic.attn_res import all_reduce
from decode_impl.generic.linear import product, projection, rms_norm
from decode_impl.mxfp4 import MXFP4Weight
from numerics.formats import bf16


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The SiTU activation in FP32: a gated product whose two factors saturate at `beta` and `linear_beta`."""
    gate, up = gate.float(), up.float()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def moe_front(*, x: Tensor, gate_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits (f32 [n, E], never rounded) and the latent input of the experts (bf16 [n, L])."""
    return product(x, gate_weight), projection(x=x, weight=down_weight)


def route(*, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Pick the `top_k` largest of sigmoid(logits) + bias; weigh them by the unbiased scores.

    Exact ties go to the lower expert id. logits: f32 [n, E]; bias: f32 [E].
    Returns (ids i64 [n, k] by falling biased score, weights f32 [n, k] that sum to `scaling`).
    """
    scores = torch.sigmoid(logits.float())
    order = torch.sort(scores + bias.float(), dim=-1, descending=True, stable=True)
    ids = order.indices[:, :top_k]
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + ROUTER_SUM_EPS) * scaling


def experts(
    *,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: MXFP4Weight,
    w2: MXFP4Weight,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """This rank's share of the routed experts, expert by expert over the rows that chose it.

    z: bf16 [n, L]; ids: i64 [n, k]; weights: f32 [n, k]; w13: [E, 2I, L], gate rows first; w2: [E, L, I'], I' >= I.
    Hidden and every (row, slot) result are rounded to BF16; slots are added in FP32 in slot order.
    Returns bf16 [n, L].
    """
    if not len(z):
        return z.new_empty(0, w2.out_features)
    order = ids.flatten().argsort(stable=True)
    chosen, counts = (x.tolist() for x in ids.unique(return_counts=True))
    rows = z[order // ids.shape[1]].float().split(counts)
    gate, up = torch.cat([x @ w13.of(e).T for x, e in zip(rows, chosen, strict=True)]).chunk(2, dim=-1)
    hidden = bf16(situ(gate, up, beta, linear_beta)).float()
    parts = zip(hidden.split(counts), chosen, strict=True)
    per_slot = z.new_empty(order.shape[0], w2.out_features)
    per_slot[order] = bf16(torch.cat([x @ w2.of(e)[..., : x.shape[-1]].T for x, e in parts]))
    return bf16(slot_ordered_sum(per_slot.unflatten(0, ids.shape), weights))


def slot_ordered_sum(per_slot: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over slots 0, 1, ... in FP32. per_slot: bf16 [n, k, L]; weights: f32 [n, k]. Returns f32 [n, L]."""
    total = per_slot[:, 0].float() * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total = total + per_slot[:, slot].float() * weights[:, slot, None]
    return total


def shared_expert(*, x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    """This rank's share of the shared expert (or of the dense MLP). Returns the partial, bf16 [n, H]."""
    gate, up = projection(x=x, weight=gate_up).chunk(2, dim=-1)
    return projection(x=bf16(situ(gate, up, beta, linear_beta)), weight=down)


def moe_tail(
    *, latent: Sequence[Tensor], shared: Sequence[Tensor], norm_weight: Tensor, up_weight: Tensor, eps: float
) -> Tensor:
    """All-reduce the latent, normalise, project up, and add the all-reduced shared expert. Returns bf16 [n, H]."""
    routed = projection(x=rms_norm(x=all_reduce(y=latent), weight=norm_weight, eps=eps), weight=up_weight)
    return bf16(routed.float() + all_reduce(y=shared).float())
