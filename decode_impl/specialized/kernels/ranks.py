"""Sums over ranks whose partials lie on one device (virtual ranks): FP32, in a fixed order, one rounding.

- y: per rank bf16 [n, H], rows at any stride, the same for all ranks; result: bf16 [n, H], fully written.
- Order: up to 32 rows four groups of consecutive ranks are summed, then the groups (the one-shot order); above that the
  ranks one after the other (the two-shot order).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.contract import ONE_SHOT_ROWS
from decode_impl.specialized.kernels.common import aligned, bf16, f32

_GROUPS = 4


@triton.jit
def rank_sum(partials, offset, mask, GROUP: tl.constexpr):
    """FP32 sum of every rank's elements at `offset`: groups of GROUP ranks in order, then the groups in order."""
    RANKS: tl.constexpr = len(partials)
    total = _group_sum(partials, 0, offset, mask, GROUP)
    for first in tl.static_range(GROUP, RANKS, GROUP):
        total += _group_sum(partials, first, offset, mask, GROUP)
    return total


@triton.jit
def _group_sum(partials, first: tl.constexpr, offset, mask, GROUP: tl.constexpr):
    total = f32(tl.load(partials[first] + offset, mask=mask, other=0.0))
    for rank in tl.static_range(1, GROUP):
        if first + rank < len(partials):
            total += f32(tl.load(partials[first + rank] + offset, mask=mask, other=0.0))
    return total


def group_of(ranks: int, rows: int) -> int:
    """Ranks of a group: a quarter of them in the one-shot order, all of them in the two-shot order."""
    return -(-ranks // _GROUPS) if rows <= ONE_SHOT_ROWS else ranks


def same_strides(partials: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The partials, all with the row stride of the first; one that differs is copied."""
    rows = tuple(aligned(x) for x in partials)
    agree = all(x.stride() == rows[0].stride() for x in rows)
    return rows if agree else tuple(x.contiguous() for x in rows)


@triton.jit
def all_reduce_kernel(partials, y_ptr, stride, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, tiles)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = rank_sum(partials, row * stride + i, i < width, GROUP)
    tl.store(y_ptr + row * width + i, bf16(total), mask=i < width)


def all_reduce(*, y: Sequence[Tensor]) -> Tensor:
    """Sum over ranks, bf16 [n, H]. Contract: module docstring."""
    partials = same_strides(y)
    rows, width = partials[0].shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=partials[0].device)
    block = 512
    all_reduce_kernel[rows, triton.cdiv(width, block)](
        partials,
        out,
        partials[0].stride(0),
        width,
        GROUP=group_of(len(partials), rows),
        BLOCK=block,
        num_warps=4,
    )
    return out
