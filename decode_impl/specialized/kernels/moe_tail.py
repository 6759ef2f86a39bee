"""The tail of the MoE: latent all-reduce and norm; up-projection, shared all-reduce and add. Two launches.

- latent: per rank bf16 [n, L]; shared: per rank bf16 [n, H]; rows at any stride, the same for all ranks;
  norm_weight: bf16 [L]; up_weight: bf16 [H, L].
- delta: bf16 [n, H], fully written; scratch: the normalised latent, bf16 [n, L].
- Rounded to BF16: the latent's sum, its norm, up, the shared sum, delta. Ranks are added in order, in FP32; the order
  of the up-projection is that of `split_k`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import bf16, f32
from decode_impl.specialized.kernels.norms import norm_warps, normalised
from decode_impl.specialized.kernels.ranks import rank_sum, same_strides
from decode_impl.specialized.kernels.split_k import arrived_last, collect, publish, skinny_plan, tile_product


@triton.jit
def latent_norm_kernel(latents, weight_ptr, out_ptr, eps, stride, width, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = f32(bf16(rank_sum(latents, row * stride + i, i < width, RANKS)))
    weight = f32(tl.load(weight_ptr + i, mask=i < width, other=0.0))
    tl.store(out_ptr + row * width + i, normalised(x, weight, eps, width), mask=i < width)


@triton.jit
def up_add_kernel(
    x_ptr,
    w_ptr,
    shared,
    delta_ptr,
    part_ptr,
    counter_ptr,
    rows,
    outputs,
    columns,
    shared_stride,
    w_stride,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (tiles, splits)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), outputs - 1)
    acc = tile_product(
        x_ptr, columns, rows, w_ptr, w_stride, n, columns, split, ROWS, BLOCK_N, BLOCK_K, SLICE, STAGES, EVEN_K
    )
    if SPLITS == 1:
        _store(acc, shared, delta_ptr, shared_stride, tile, rows, outputs, RANKS, ROWS, BLOCK_N)
    else:
        publish(acc, rows, part_ptr, tile, split, ROWS, BLOCK_N, SPLITS)
        if arrived_last(counter_ptr, tile, SPLITS):
            acc = collect(rows, part_ptr, tile, ROWS, BLOCK_N, SPLITS)
            _store(acc, shared, delta_ptr, shared_stride, tile, rows, outputs, RANKS, ROWS, BLOCK_N)


@triton.jit
def _store(
    acc,
    shared,
    delta_ptr,
    shared_stride,
    tile,
    rows,
    outputs,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    inside = (row[None, :] < rows) & (n[:, None] < outputs)
    total = rank_sum(shared, row.to(tl.int64)[None, :] * shared_stride + n[:, None], inside, RANKS)
    delta = bf16(f32(bf16(acc)) + f32(bf16(total)))
    tl.store(delta_ptr + row.to(tl.int64)[None, :] * outputs + n[:, None], delta, mask=inside)


def moe_tail(
    *, latent: Sequence[Tensor], shared: Sequence[Tensor], norm_weight: Tensor, up_weight: Tensor, eps: float
) -> Tensor:
    """The MoE's output, bf16 [n, H]. Contract: module docstring."""
    latents, partials = same_strides(latent), same_strides(shared)
    rows, columns = latents[0].shape
    outputs = up_weight.shape[0]
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=up_weight.device)
    block = triton.next_power_of_2(columns)
    latent_norm_kernel[rows,](
        latents,
        norm_weight,
        x,
        eps,
        latents[0].stride(0),
        columns,
        RANKS=len(latents),
        BLOCK=block,
        num_warps=norm_warps(block),
    )
    delta = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    plan = skinny_plan(rows, columns, outputs)
    parts, arrivals = plan.workspace(x)
    up_add_kernel[plan.tiles, plan.splits](
        x,
        up_weight,
        partials,
        delta,
        parts,
        arrivals,
        rows,
        outputs,
        columns,
        partials[0].stride(0),
        up_weight.stride(0),
        RANKS=len(partials),
        EVEN_K=columns == plan.slice * plan.splits,
        num_warps=4,
        **plan.constants,
    )
    return delta
