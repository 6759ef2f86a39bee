"""The skinny projection: `y = bf(x @ weight^T)`.

- x: bf16 [n, K], rows at any stride, elements adjacent; weight: bf16 [N, K] likewise. 1 <= n <= 64.
- y: bf16 [n, N], fully written, contiguous.
- Rounded: y, once. Products are exact in FP32; the order of their sum is that of `split_k`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import bf16
from decode_impl.specialized.kernels.split_k import arrived_last, collect, publish, skinny_plan, tile_product


@triton.jit
def projection_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    part_ptr,
    counter_ptr,
    rows,
    outputs,
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
    """Grid (tiles, splits)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), outputs - 1)
    acc = tile_product(
        x_ptr, x_stride, rows, w_ptr, w_stride, n, columns, split, ROWS, BLOCK_N, BLOCK_K, SLICE, STAGES, EVEN_K
    )
    if SPLITS == 1:
        _store(acc, y_ptr, tile, rows, outputs, ROWS, BLOCK_N)
    else:
        publish(acc, rows, part_ptr, tile, split, ROWS, BLOCK_N, SPLITS)
        if arrived_last(counter_ptr, tile, SPLITS):
            _store(collect(rows, part_ptr, tile, ROWS, BLOCK_N, SPLITS), y_ptr, tile, rows, outputs, ROWS, BLOCK_N)


@triton.jit
def _store(acc, y_ptr, tile, rows, outputs, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    n, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    inside = (row[None, :] < rows) & (n[:, None] < outputs)
    tl.store(y_ptr + row.to(tl.int64)[None, :] * outputs + n[:, None], bf16(acc), mask=inside)


def projection(*, x: Tensor, weight: Tensor) -> Tensor:
    """`bf(x @ weight^T)`, bf16 [n, N]. Contract: module docstring."""
    rows, columns = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    plan = skinny_plan(rows, columns, outputs)
    parts, arrivals = plan.workspace(x)
    projection_kernel[plan.tiles, plan.splits](
        x,
        weight,
        y,
        parts,
        arrivals,
        rows,
        outputs,
        columns,
        x.stride(0),
        weight.stride(0),
        EVEN_K=columns == plan.slice * plan.splits,
        num_warps=4,
        **plan.constants,
    )
    return y
