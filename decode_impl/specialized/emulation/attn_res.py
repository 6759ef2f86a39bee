"""Emulated residual kernels: output projection, all-reduce, prefix add, AttnRes and norm as one fused boundary.

The output norm's sum of squares comes from a quadratic form over the block part and the prefix part of the mix, so that
the kernel can compute the block part before the prefix has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_impl.parallel.reduce import grouped_sum, sequential_sum
from decode_impl.specialized.contract import ONE_SHOT_ROWS
from decode_impl.specialized.emulation.elementary import exp
from decode_impl.specialized.emulation.projection import projection
from numerics.formats import bf16


def all_reduce(*, y: Sequence[Tensor]) -> Tensor:
    """Sum over ranks in FP32, one rounding: one-shot order up to 32 rows, two-shot order above. Returns bf16 [n, H]."""
    ordered = grouped_sum if y[0].shape[0] <= ONE_SHOT_ROWS else sequential_sum
    return bf16(ordered(y))


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
    """AttnRes in two parts, blocks and prefix, joined by their softmax weights. Shapes as in docs/ops.md."""
    total = prefix if delta is None else bf16(prefix.float() + delta.float())
    p = total.float()
    if not num_blocks:
        mix, square = p, p.square().sum(-1, keepdim=True)
    else:
        query = norm_weight.float() * query_weight.float()
        mix, square = _joined_parts(blocks[:, :num_blocks].float(), p, query, eps)
    if out_norm_weight is None:
        return total, bf16(mix)
    inverse = (square * (1.0 / p.shape[-1]) + eps).rsqrt()
    return total, bf16(mix * inverse * out_norm_weight.float())


def _joined_parts(sources: Tensor, p: Tensor, query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mix (f32 [n, H]) and its sum of squares by the quadratic form (f32 [n, 1])."""
    width = 1.0 / p.shape[-1]
    block_logits = (sources.square().sum(-1) * width + eps).rsqrt() * (sources * query).sum(-1)
    p_square = p.square().sum(-1, keepdim=True)
    prefix_logit = (p_square * width + eps).rsqrt() * (p * query).sum(-1, keepdim=True)
    top = torch.maximum(block_logits.amax(-1, keepdim=True), prefix_logit)
    block_weights, prefix_weight = exp(block_logits - top), exp(prefix_logit - top)
    block_mix = (block_weights[..., None] * sources).sum(1)
    inverse = 1.0 / (block_weights.sum(-1, keepdim=True) + prefix_weight)
    cross = (block_mix * p).sum(-1, keepdim=True)
    block_square = block_mix.square().sum(-1, keepdim=True)
    square = block_square + 2.0 * prefix_weight * cross + prefix_weight.square() * p_square
    return (block_mix + prefix_weight * p) * inverse, square * inverse.square()


def output_mix(
    *,
    y: Sequence[Tensor],
    weight: Sequence[Tensor],
    replace_prefix: bool,
    prefix: Tensor,
    blocks: Tensor,
    num_blocks: int,
    norm_weight: Tensor,
    query_weight: Tensor,
    eps: float,
    out_norm_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output projection of every rank, rank-ordered all-reduce, prefix add (or replacement), AttnRes and norm."""
    attention = all_reduce(y=[projection(x=rows, weight=w) for rows, w in zip(y, weight, strict=True)])
    return attn_res(
        prefix=attention if replace_prefix else prefix,
        delta=None if replace_prefix else attention,
        blocks=blocks,
        num_blocks=num_blocks,
        norm_weight=norm_weight,
        query_weight=query_weight,
        eps=eps,
        out_norm_weight=out_norm_weight,
    )
