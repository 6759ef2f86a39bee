"""The front of the MoE: router logits and the latent input of the experts, in one launch over the rows of both weights.

- x: bf16 [n, H], rows at any stride; gate_weight: bf16 [E, H]; down_weight: bf16 [L, H].
- logits: f32 [n, E], never rounded; z: bf16 [n, L]; both fully written.
- Rounded to BF16: z. The order of sums is that of `split_k`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import bf16
from decode_impl.specialized.kernels.split_k import arrived_last, collect, publish, skinny_plan, tile_product


@triton.jit
def moe_front_kernel(
    x_ptr,
    gate_ptr,
    down_ptr,
    logits_ptr,
    z_ptr,
    part_ptr,
    counter_ptr,
    rows,
    experts,
    latent,
    columns,
    x_stride,
    gate_stride,
    down_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Grid (tiles of both weights, router first; splits)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    router_tiles = tl.cdiv(experts, BLOCK_N)
    router = tile < router_tiles
    # Selects, not branches: a pointer that comes out of a branch has lost its alignment, and with it the wide loads.
    weight = tl.where(router, gate_ptr, down_ptr)
    stride = tl.where(router, gate_stride, down_stride)
    outputs = tl.where(router, experts, latent)
    first = tl.where(router, tile, tile - router_tiles) * BLOCK_N
    n = tl.minimum(first + tl.arange(0, BLOCK_N), outputs - 1)
    acc = tile_product(
        x_ptr, x_stride, rows, weight, stride, n, columns, split, ROWS, BLOCK_N, BLOCK_K, SLICE, STAGES, EVEN_K
    )
    if SPLITS == 1:
        _store(acc, logits_ptr, z_ptr, router, first, outputs, rows, ROWS, BLOCK_N)
    else:
        publish(acc, rows, part_ptr, tile, split, ROWS, BLOCK_N, SPLITS)
        if arrived_last(counter_ptr, tile, SPLITS):
            acc = collect(rows, part_ptr, tile, ROWS, BLOCK_N, SPLITS)
            _store(acc, logits_ptr, z_ptr, router, first, outputs, rows, ROWS, BLOCK_N)


@triton.jit
def _store(acc, logits_ptr, z_ptr, router, first, outputs, rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    n, row = first + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    inside = (row[None, :] < rows) & (n[:, None] < outputs)
    offset = row.to(tl.int64)[None, :] * outputs + n[:, None]
    if router:
        tl.store(logits_ptr + offset, acc, mask=inside)
    else:
        tl.store(z_ptr + offset, bf16(acc), mask=inside)


def moe_front(*, x: Tensor, gate_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(logits f32 [n, E], z bf16 [n, L]). Contract: module docstring."""
    rows, columns = x.shape
    experts, latent = gate_weight.shape[0], down_weight.shape[0]
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    z = torch.empty(rows, latent, dtype=torch.bfloat16, device=x.device)
    plan = skinny_plan(rows, columns, experts, latent)
    parts, arrivals = plan.workspace(x)
    moe_front_kernel[plan.tiles, plan.splits](
        x,
        gate_weight,
        down_weight,
        logits,
        z,
        parts,
        arrivals,
        rows,
        experts,
        latent,
        columns,
        x.stride(0),
        gate_weight.stride(0),
        down_weight.stride(0),
        EVEN_K=columns == plan.slice * plan.splits,
        num_warps=4,
        **plan.constants,
    )
    return logits, z
