"""Our generic ops with vLLM 0.33's roundings where the contracts differ: a difference that they explain goes away.

Only roundings are changed; see `differences` for the list.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from decode_impl import generic
from decode_impl.generic.mla import widen
from decode_impl.generic.moe import situ
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.ops import OpTable
from numerics.formats import bf16


def experts(
    *,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: MXFP4Weight,
    w2: MXFP4Weight,
    beta: float,
    linear_beta: float,
    weigh_in_bf16: bool = True,
) -> Tensor:
    """The experts op (docs/ops.md): gate and up rounded to BF16 before SiTU, the sum over slots after every addition.

    Marlin rounds slot results and weights to BF16 before it multiplies (`weigh_in_bf16`); Triton multiplies in FP32.
    """
    total = z.new_zeros(z.shape[0], w2.out_features)
    for slot in range(ids.shape[1]):
        total = bf16(
            total.float() + _slot(z, ids[:, slot], weights[:, slot], w13, w2, beta, linear_beta, weigh_in_bf16)
        )
    return total


def _slot(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: MXFP4Weight,
    w2: MXFP4Weight,
    beta: float,
    linear_beta: float,
    weigh_in_bf16: bool,
) -> Tensor:
    """One slot's weighted result, f32 [n, L] of BF16 numbers."""
    result = torch.empty(z.shape[0], w2.out_features, device=z.device)
    for expert in chosen.unique().tolist():
        rows = (chosen == expert).nonzero().squeeze(-1)
        gate, up = bf16(z[rows].float() @ w13.dense[expert].T).chunk(2, dim=-1)
        hidden = bf16(situ(gate, up, beta, linear_beta)).float()
        product, weight = hidden @ w2.dense[expert, :, : hidden.shape[-1]].T, weights[rows, None]
        if weigh_in_bf16:
            product, weight = bf16(product).float(), bf16(weight).float()
        result[rows] = bf16(product * weight).float()
    return result


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
    """The mla_attend op (docs/ops.md, BF16 cache): softmax numerators rounded to BF16 before they meet the values."""
    pages = -(-int(lengths.max()) // cache.shape[1])
    keys = widen(cache[block_table[:, :pages]]).flatten(1, 2)
    scores = widen(q) @ keys.transpose(-1, -2) * softmax_scale
    unseen = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    scores = scores.masked_fill(unseen[:, None], -torch.inf)
    numerators = (scores - scores.amax(-1, keepdim=True)).exp()
    values = keys[..., :kv_rank].masked_fill(unseen[..., None], 0.0)
    return bf16(bf16(numerators).float() @ values / numerators.sum(-1, keepdim=True))


def operations(dense_experts: bool = False) -> OpTable:
    """The generic ops with vLLM's roundings; `dense_experts` for BF16 experts (Triton) instead of MXFP4 (Marlin)."""
    changed = {"experts": partial(experts, weigh_in_bf16=not dense_experts), "mla_attend": mla_attend}
    return {**generic.OPS, **changed}
