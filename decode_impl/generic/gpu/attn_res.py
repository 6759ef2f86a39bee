"""Attention residuals in one launch after the output projection: prefix add, softmax over blocks, mix, output norm.

- prefix, delta: bf16 [n, H], rows at any stride; blocks: bf16 [n, NB, H], of which the first `num_blocks` are read.
- Returns (new prefix, mixed), bf16 [n, H], fully written; rounded where the plain op rounds, and nowhere else.
- A CTA owns a row and goes over the blocks once, with a running maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.generic.gpu.linear import projection, reduced
from decode_impl.specialized.kernels.common import aligned, bf16, exp, f32


@triton.jit
def attn_res_kernel(
    prefix_ptr,
    delta_ptr,
    blocks_ptr,
    norm_weight_ptr,
    query_weight_ptr,
    out_weight_ptr,
    new_prefix_ptr,
    mixed_ptr,
    eps,
    prefix_stride,
    delta_stride,
    blocks_stride,
    block_stride,
    width,
    NUM_BLOCKS: tl.constexpr,
    DELTA: tl.constexpr,
    OUT_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    p = f32(tl.load(prefix_ptr + row * prefix_stride + i, mask=inside, other=0.0))
    if DELTA:
        p = f32(bf16(p + f32(tl.load(delta_ptr + row * delta_stride + i, mask=inside, other=0.0))))
    tl.store(new_prefix_ptr + row * width + i, bf16(p), mask=inside)
    mix = p
    if NUM_BLOCKS > 0:
        query = f32(tl.load(norm_weight_ptr + i, mask=inside, other=0.0))
        query *= f32(tl.load(query_weight_ptr + i, mask=inside, other=0.0))
        top = tl.rsqrt(tl.sum(p * p) / width + eps) * tl.sum(p * query)
        total = top * 0.0 + 1.0
        for block in tl.static_range(NUM_BLOCKS):
            source = blocks_ptr + row * blocks_stride + block * block_stride
            x = f32(tl.load(source + i, mask=inside, other=0.0))
            score = tl.rsqrt(tl.sum(x * x) / width + eps) * tl.sum(x * query)
            higher = tl.maximum(top, score)
            old, new = exp(top - higher), exp(score - higher)
            mix = mix * old + x * new
            total = total * old + new
            top = higher
        mix = mix / total
    if OUT_NORM:
        mix = mix * tl.rsqrt(tl.sum(mix * mix) / width + eps)
        mix *= f32(tl.load(out_weight_ptr + i, mask=inside, other=0.0))
    tl.store(mixed_ptr + row * width + i, bf16(mix), mask=inside)


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
    """Add `delta`, mix with the first `num_blocks` blocks, normalise. Returns (new prefix, mixed), bf16 [n, H]."""
    prefix, blocks = aligned(prefix), aligned(blocks)
    added = prefix if delta is None else aligned(delta)
    rows, width = prefix.shape
    new_prefix = torch.empty(rows, width, dtype=torch.bfloat16, device=prefix.device)
    mixed = torch.empty_like(new_prefix)
    if not rows:
        return new_prefix, mixed
    attn_res_kernel[rows,](
        prefix,
        added,
        blocks,
        norm_weight,
        query_weight,
        norm_weight if out_norm_weight is None else out_norm_weight,
        new_prefix,
        mixed,
        eps,
        prefix.stride(0),
        added.stride(0),
        blocks.stride(0),
        blocks.stride(1),
        width,
        NUM_BLOCKS=num_blocks,
        DELTA=delta is not None,
        OUT_NORM=out_norm_weight is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=16 if width > 1024 else 4,
    )
    return new_prefix, mixed


def output_mix(
    *,
    y: Sequence[Tensor],
    weight: Sequence[Tensor],
    replace_prefix: bool,
    prefix: Tensor,
    **mix: object,
) -> tuple[Tensor, Tensor]:
    """Output projection of every rank, all-reduce, and the residual mix in front of the MLP."""
    attention = reduced([projection(x=rows, weight=w) for rows, w in zip(y, weight, strict=True)])
    if replace_prefix:
        return attn_res(prefix=attention, **mix)  # type: ignore[arg-type]
    return attn_res(prefix=prefix, delta=attention, **mix)  # type: ignore[arg-type]
