"""Attention residuals of the generic path: a learned softmax over earlier residual blocks and the running prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_impl.generic.linear import normalised, projection
from decode_impl.parallel.reduce import sequential_sum
from numerics.formats import bf16


def source_logits(sources: Tensor, norm_weight: Tensor, query_weight: Tensor, eps: float) -> Tensor:
    """Score of every source: the query against the RMS-normalised source, in FP32 with an unrounded weight product.

    sources: f32 [n, S, H]; weights: [H]. Returns f32 [n, S].
    """
    inverse = (sources.square().mean(-1) + eps).rsqrt()
    return inverse * (sources * (norm_weight.float() * query_weight.float())).sum(-1)


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
    """Add `delta` to the prefix, mix it with the first `num_blocks` blocks, and normalise.

    prefix, delta: bf16 [n, H]; blocks: bf16 [n, NB, H]. Returns (new prefix, mixed), both bf16 [n, H].
    Without `out_norm_weight` the mix is rounded as it is (the end of the model).
    """
    total = prefix if delta is None else bf16(prefix.float() + delta.float())
    mix = total.float()
    if num_blocks:
        sources = torch.cat([blocks[:, :num_blocks], total[:, None]], dim=1).float()
        weights = source_logits(sources, norm_weight, query_weight, eps).softmax(-1)
        mix = (weights[..., None] * sources).sum(1)
    if out_norm_weight is None:
        return total, bf16(mix)
    return total, bf16(normalised(mix, eps) * out_norm_weight.float())


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
    """Output projection of every rank, all-reduce, and the residual mix in front of the MLP.

    y: per rank bf16 [n, K_r]; weight: per rank [H, K_r]. On a block-write layer (`replace_prefix`) the attention output
    starts a new prefix; elsewhere it is added. Returns (new prefix, mixed), both bf16 [n, H].
    """
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


def all_reduce(*, y: Sequence[Tensor]) -> Tensor:
    """Sum of every rank's partial, FP32 in rank order, one rounding. y: per rank bf16 [n, H]. Returns bf16 [n, H]."""
    return bf16(sequential_sum(y))
