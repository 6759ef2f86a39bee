"""Emulated latent-MoE kernels: shared front, exact router, grouped MXFP4 experts, shared expert, fused tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_impl.config import ROUTER_SUM_EPS
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.parallel.reduce import sequential_sum
from decode_impl.specialized.emulation.elementary import sigmoid, tanh
from decode_impl.specialized.emulation.projection import projection, rms_norm, split_k_product
from numerics.formats import bf16


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU in FP32 with the two outer constants folded into one, as the kernels do. Shapes of the inputs agree."""
    saturated = tanh(gate * (1.0 / beta)) * tanh(up * (1.0 / linear_beta))
    return saturated * sigmoid(gate) * (beta * linear_beta)


def moe_front(*, x: Tensor, gate_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    """One kernel for router and latent-down rows. Returns (logits f32 [n, E], z bf16 [n, L])."""
    return split_k_product(x, gate_weight), bf16(split_k_product(x, down_weight))


def route(*, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Exact top-k by repeated maximum, ties to the lower id; weights from unbiased scores. Shapes as in docs/ops.md."""
    scores = sigmoid(logits)
    ranking = scores + bias.float()
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int64, device=logits.device)
    for slot in range(top_k):
        # `max` may return any index of a tie; the first one is the lowest expert id.
        best = (ranking == ranking.amax(-1, keepdim=True)).float().argmax(-1)
        ids[:, slot] = best
        ranking = ranking.scatter(-1, best[:, None], -torch.inf)
    chosen = scores.gather(-1, ids)
    return ids, chosen * (scaling / (sequential_sum(list(chosen.split(1, -1))) + ROUTER_SUM_EPS))


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
    """Every chosen expert over the whole batch bin, then each row picks its slots; slots are added in order in FP32.

    Working on whole bins keeps a row's bits independent of which other rows chose the same expert.
    Shapes as in docs/ops.md. Returns bf16 [n, L].
    """
    active, slot_expert = ids.unique(return_inverse=True)
    gate, up = (z.float() @ w13.of(active).transpose(-1, -2)).chunk(2, dim=-1)
    hidden = bf16(situ(gate, up, beta, linear_beta)).float()
    down = w2.of(active)[..., : hidden.shape[-1]].transpose(-1, -2)
    rows = torch.arange(z.shape[0], device=z.device)[:, None]
    per_slot = bf16(hidden @ down)[slot_expert, rows].float()
    total = per_slot[:, 0] * weights[:, :1]
    for slot in range(1, ids.shape[1]):
        total = torch.addcmul(total, per_slot[:, slot], weights[:, slot, None])
    return bf16(total)


def shared_expert(*, x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Gate and up rounded to BF16, SiTU, one rounding, down partial. Returns bf16 [n, H]."""
    gate, up = projection(x=x, weight=gate_up).float().chunk(2, dim=-1)
    return projection(x=bf16(situ(gate, up, beta, linear_beta)), weight=down)


def moe_tail(
    *, latent: Sequence[Tensor], shared: Sequence[Tensor], norm_weight: Tensor, up_weight: Tensor, eps: float
) -> Tensor:
    """Latent all-reduce, norm, up-projection, shared all-reduce and add: three roundings. Returns bf16 [n, H]."""
    routed = rms_norm(x=bf16(sequential_sum(latent)), weight=norm_weight, eps=eps)
    return bf16(projection(x=routed, weight=up_weight).float() + bf16(sequential_sum(shared)).float())
