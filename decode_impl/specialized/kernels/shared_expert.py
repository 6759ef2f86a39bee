"""The shared expert (and the dense MLP): gate, up and SiTU in one launch, the down partial in another.

- x: bf16 [n, H], rows at any stride; gate_up: bf16 [2I, H], gate rows first; down: bf16 [H, I].
- partial: bf16 [n, H], fully written; scratch: hidden bf16 [n, I].
- Rounded to BF16: gate and up, the hidden, the partial. The order of sums is that of `split_k`.
- A tile alternates rows of gate and up, so that the CTA that has their sums has both factors of its SiTU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import bf16, f32, situ
from decode_impl.specialized.kernels.projection import projection
from decode_impl.specialized.kernels.split_k import arrived_last, collect, publish, skinny_plan, tile_product


@triton.jit
def gate_up_kernel(
    x_ptr,
    w_ptr,
    hidden_ptr,
    part_ptr,
    counter_ptr,
    beta,
    linear_beta,
    rows,
    width,
    columns,
    x_stride,
    w_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (tiles of BLOCK_N / 2 hidden columns, splits)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK_N)
    n = tl.minimum(tile * (BLOCK_N // 2) + i // 2, width - 1) + (i % 2) * width
    acc = tile_product(
        x_ptr, x_stride, rows, w_ptr, w_stride, n, columns, split, ROWS, BLOCK_N, BLOCK_K, SLICE, STAGES, EVEN_K
    )
    if SPLITS == 1:
        _store(acc, hidden_ptr, beta, linear_beta, tile, rows, width, ROWS, BLOCK_N)
    else:
        publish(acc, rows, part_ptr, tile, split, ROWS, BLOCK_N, SPLITS)
        if arrived_last(counter_ptr, tile, SPLITS):
            acc = collect(rows, part_ptr, tile, ROWS, BLOCK_N, SPLITS)
            _store(acc, hidden_ptr, beta, linear_beta, tile, rows, width, ROWS, BLOCK_N)


@triton.jit
def _store(acc, hidden_ptr, beta, linear_beta, tile, rows, width, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    rounded = f32(bf16(acc))
    gate, up = tl.split(tl.permute(tl.reshape(rounded, [BLOCK_N // 2, 2, ROWS]), [0, 2, 1]))
    n, row = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), tl.arange(0, ROWS)
    inside = (row[None, :] < rows) & (n[:, None] < width)
    hidden = hidden_ptr + row.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(hidden, bf16(situ(gate, up, beta, linear_beta)), mask=inside)


def shared_expert(*, x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    """This rank's partial, bf16 [n, H]. Contract: module docstring."""
    rows, columns = x.shape
    width = gate_up.shape[0] // 2
    if not width:
        return torch.zeros(rows, down.shape[0], dtype=torch.bfloat16, device=x.device)
    hidden = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    plan = skinny_plan(rows, columns, 2 * width)
    parts, arrivals = plan.workspace(x)
    gate_up_kernel[plan.tiles, plan.splits](
        x,
        gate_up,
        hidden,
        parts,
        arrivals,
        beta,
        linear_beta,
        rows,
        width,
        columns,
        x.stride(0),
        gate_up.stride(0),
        EVEN_K=columns == plan.slice * plan.splits,
        num_warps=4,
        **plan.constants,
    )
    return projection(x=hidden, weight=down)
