"""Residual kernels: (all-reduce,) prefix add, AttnRes over the blocks, and the output norm, one CTA a row.

- prefix: bf16 [n, H]; delta: bf16 [n, H], or one partial per rank, to be summed as `ranks` says; rows at any stride;
  blocks: bf16 [n, NB, H], of which the first `num_blocks` are read; weights bf16 [H].
- Returns (new prefix, mixed), bf16 [n, H], fully written. With `replace_prefix` the old prefix is not read.
- Rounded to BF16: the sum over ranks, the prefix, and mixed. Everything else is FP32: softmax weights relative to the
  largest score; the mix in block order, then the prefix; the norm's sum of squares by the quadratic form of both parts.
- `output_mix`: a skinny projection per rank (its partial rounded to BF16), then this kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import aligned, bf16, exp, f32
from decode_impl.specialized.kernels.projection import projection
from decode_impl.specialized.kernels.ranks import group_of, rank_sum, same_strides


@triton.jit
def attn_res_kernel(
    deltas,
    prefix_ptr,
    blocks_ptr,
    norm_weight_ptr,
    query_weight_ptr,
    out_weight_ptr,
    new_prefix_ptr,
    mixed_ptr,
    eps,
    delta_stride,
    prefix_stride,
    blocks_stride,
    block_stride,
    WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DELTA: tl.constexpr,
    REPLACE: tl.constexpr,
    OUT_NORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_H)
    inside = i < WIDTH
    if DELTA:
        p = f32(bf16(rank_sum(deltas, row * delta_stride + i, inside, GROUP)))
        if not REPLACE:
            p = f32(bf16(f32(tl.load(prefix_ptr + row * prefix_stride + i, mask=inside, other=0.0)) + p))
    else:
        p = f32(tl.load(prefix_ptr + row * prefix_stride + i, mask=inside, other=0.0))
    tl.store(new_prefix_ptr + row * WIDTH + i, bf16(p), mask=inside)
    p_square = tl.sum(p * p)
    mix = p
    square = p_square
    if NUM_BLOCKS > 0:
        source = blocks_ptr + row * blocks_stride
        scores = _block_scores(
            source, norm_weight_ptr, query_weight_ptr, eps, block_stride, WIDTH, NUM_BLOCKS, BLOCKS, CHUNK
        )
        query = f32(tl.load(norm_weight_ptr + i, mask=inside, other=0.0)) * f32(
            tl.load(query_weight_ptr + i, mask=inside, other=0.0)
        )
        score = tl.rsqrt(p_square * (1.0 / WIDTH) + eps) * tl.sum(p * query)
        top = tl.maximum(tl.max(scores), score)
        weights, weight = exp(scores - top), exp(score - top)
        inverse = 1.0 / (tl.sum(weights) + weight)
        mix = tl.zeros([BLOCK_H], tl.float32)
        which = tl.arange(0, BLOCKS)
        for block in tl.static_range(NUM_BLOCKS):
            x = f32(tl.load(source + block * block_stride + i, mask=inside, other=0.0))
            mix += tl.sum(tl.where(which == block, weights, 0.0)) * x
        cross, block_square = tl.sum(mix * p), tl.sum(mix * mix)
        square = (block_square + 2.0 * weight * cross + weight * weight * p_square) * inverse * inverse
        mix = (mix + weight * p) * inverse
    if OUT_NORM:
        mix *= tl.rsqrt(square * (1.0 / WIDTH) + eps) * f32(tl.load(out_weight_ptr + i, mask=inside, other=0.0))
    tl.store(mixed_ptr + row * WIDTH + i, bf16(mix), mask=inside)


@triton.jit
def _block_scores(
    source,
    norm_weight_ptr,
    query_weight_ptr,
    eps,
    block_stride,
    WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Score of every block, FP32 [BLOCKS], -inf beyond NUM_BLOCKS: all blocks side by side, CHUNK columns at a time."""
    block, i = tl.arange(0, BLOCKS), tl.arange(0, CHUNK)
    squares = tl.zeros([BLOCKS, CHUNK], tl.float32)
    products = tl.zeros([BLOCKS, CHUNK], tl.float32)
    for start in tl.range(0, WIDTH, CHUNK, num_stages=4):
        inside = start + i < WIDTH
        query = f32(tl.load(norm_weight_ptr + start + i, mask=inside, other=0.0)) * f32(
            tl.load(query_weight_ptr + start + i, mask=inside, other=0.0)
        )
        mask = (block < NUM_BLOCKS)[:, None] & inside[None, :]
        x = f32(tl.load(source + block[:, None] * block_stride + start + i[None, :], mask=mask, other=0.0))
        squares += x * x
        products += x * query[None, :]
    scores = tl.rsqrt(tl.sum(squares, 1) * (1.0 / WIDTH) + eps) * tl.sum(products, 1)
    return tl.where(block < NUM_BLOCKS, scores, float("-inf"))


def _mix(
    deltas: Sequence[Tensor],
    replace: bool,
    prefix: Tensor,
    blocks: Tensor,
    num_blocks: int,
    norm_weight: Tensor,
    query_weight: Tensor,
    eps: float,
    out_norm_weight: Tensor | None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """`deltas` are those of the first ranks of `ranks`; the others hold no head and would add zeros."""
    prefix, blocks = aligned(prefix), aligned(blocks)
    rows, width = prefix.shape
    new_prefix = torch.empty(rows, width, dtype=torch.bfloat16, device=prefix.device)
    mixed = torch.empty_like(new_prefix)
    parts = same_strides(deltas) if deltas else (prefix,)
    attn_res_kernel[rows,](
        parts,
        prefix,
        blocks,
        norm_weight,
        query_weight,
        norm_weight if out_norm_weight is None else out_norm_weight,
        new_prefix,
        mixed,
        eps,
        parts[0].stride(0),
        prefix.stride(0),
        blocks.stride(0),
        blocks.stride(1),
        WIDTH=width,
        NUM_BLOCKS=num_blocks,
        BLOCKS=max(2, triton.next_power_of_2(num_blocks)),
        DELTA=bool(deltas),
        REPLACE=replace,
        OUT_NORM=out_norm_weight is not None,
        GROUP=group_of(ranks, rows),
        BLOCK_H=triton.next_power_of_2(width),
        CHUNK=min(1024, triton.next_power_of_2(width)),
        num_warps=16 if width > 1024 else 4,
    )
    return new_prefix, mixed


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
    """Prefix add, mix over blocks, output norm. Contract: module docstring."""
    deltas = () if delta is None else (delta,)
    return _mix(deltas, False, prefix, blocks, num_blocks, norm_weight, query_weight, eps, out_norm_weight)


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
    """Output projection of every rank, their sum, and the mix in front of the MLP. Contract: module docstring."""
    partials = [projection(x=rows, weight=w) for rows, w in zip(y, weight, strict=True) if w.shape[1]]
    mix = (prefix, blocks, num_blocks, norm_weight, query_weight, eps, out_norm_weight)
    return _mix(partials, replace_prefix, *mix, ranks=len(y))
