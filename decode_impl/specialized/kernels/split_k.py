"""Skinny matrix products: a few rows against a weight that is streamed from memory exactly once.

The weight is the *left* operand, so its rows fill the tensor core and the batch's few rows are its short side. A CTA
owns `BLOCK_N` weight rows and one slice of K. Where one slice would leave multiprocessors idle there are more: each
stores its FP32 partial, and the CTA that arrives last at a tile adds them in slice order. Which CTA that is differs
from run to run, the order of the sum does not: no float atomics, and a row's bits are a function of its bin and the
shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.kernels.common import MULTIPROCESSORS, counters, dot, padded_rows

_MAX_SPLITS = 16
_LEAST_BLOCKS = 2

_COST_OF_A_SLICE = 0.01
"""Share of a launch that one more slice of 16 rows costs: a partial to write and to add."""


@dataclass(frozen=True)
class SkinnyPlan:
    """Geometry of one product, a function of shape and bin alone. `rows` is the padded short side."""

    rows: int
    block_n: int
    block_k: int
    tiles: int
    splits: int
    slice: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time arguments that every kernel of this kind takes."""
        return {
            "ROWS": self.rows,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "SPLITS": self.splits,
            "SLICE": self.slice,
            "STAGES": self.stages,
        }

    def workspace(self, x: Tensor, tiles: int | None = None) -> tuple[Tensor, Tensor]:
        """FP32 partials of every slice, and the tiles' arrival counters."""
        tiles = tiles or self.tiles
        size = tiles * self.splits * self.rows * self.block_n if self.splits > 1 else 0
        return torch.empty(size, dtype=torch.float32, device=x.device), counters(x, tiles)


def skinny_plan(rows: int, columns: int, *outputs: int, block_n: int = 64) -> SkinnyPlan:
    """Cut `outputs` (weight rows, one entry per weight of the launch) times `columns` (K) into tiles and slices.

    Slices are whole K blocks.
    """
    padded = padded_rows(batch_bin(rows))
    block_k = min(128, max(32, triton.next_power_of_2(columns)))
    tiles = sum(-(-n // block_n) for n in outputs)
    blocks = -(-columns // block_k)
    splits, per_slice = slices(tiles, blocks, padded)
    stages = 5 if padded <= 16 else 4 if padded <= 32 else 3
    return SkinnyPlan(padded, block_n, block_k, tiles, splits, per_slice * block_k, stages)


def slices(tiles: int, blocks: int, rows: int = 16) -> tuple[int, int]:
    """Slices of K, and K blocks of each, for `tiles` output tiles of `blocks` K blocks and a short side of `rows`.

    Slices are equal. CTAs take about equal time, so a launch lasts as long as the multiprocessor that gets the most of
    them: of all numbers of slices the one is taken that spreads them best, less `_COST_OF_A_SLICE` of it each.
    """
    candidates = [s for s in range(1, _MAX_SPLITS + 1) if blocks % s == 0 and (s == 1 or blocks // s >= _LEAST_BLOCKS)]
    splits = max(candidates, key=lambda s: (_balance(tiles * s) * (1 - _COST_OF_A_SLICE * s * rows / 16), -s))
    return splits, blocks // splits


def _balance(ctas: int) -> float:
    """Mean CTAs of a multiprocessor over the most that one gets."""
    return ctas / MULTIPROCESSORS / -(-ctas // MULTIPROCESSORS)


@triton.jit
def tile_product(
    x_ptr,
    x_stride,
    rows,
    w_ptr,
    w_stride,
    n,
    columns,
    split,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """FP32 [BLOCK_N, ROWS]: weight rows `n` (all valid) times the batch, over slice `split` of K.

    Rows beyond the batch repeat its last one; nobody stores them.
    """
    row = tl.minimum(tl.arange(0, ROWS), rows - 1).to(tl.int64)
    k = split * SLICE + tl.arange(0, BLOCK_K)
    w = w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :]
    x = x_ptr + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, SLICE, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            weight = tl.load(w)
            batch = tl.load(x)
        else:
            inside = k + start < columns
            weight = tl.load(w, mask=inside[None, :], other=0.0)
            batch = tl.load(x, mask=inside[:, None], other=0.0)
        acc = dot(weight, batch, acc)
        w += BLOCK_K
        x += BLOCK_K
    return acc


@triton.jit
def publish(acc, rows, part_ptr, tile, split, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Store one slice's partial of a tile, row by row."""
    n, row = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    part = part_ptr + ((tile * SPLITS + split) * ROWS).to(tl.int64) * BLOCK_N
    tl.store(part + row[None, :] * BLOCK_N + n[:, None], acc, mask=row[None, :] < rows)


@triton.jit
def arrived_last(counter_ptr, tile, SPLITS: tl.constexpr):
    """Whether this CTA is the last of a tile; what the others published is then visible, and the counter zero again."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = before == SPLITS - 1
    if last:
        tl.store(counter_ptr + tile, 0)
    return last


@triton.jit
def collect(rows, part_ptr, tile, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of a tile's partials in slice order, FP32 [BLOCK_N, ROWS]."""
    n, row = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    part = part_ptr + (tile * SPLITS * ROWS).to(tl.int64) * BLOCK_N + row[None, :] * BLOCK_N + n[:, None]
    total = tl.load(part, mask=row[None, :] < rows, other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(1, SPLITS):
        part += ROWS * BLOCK_N
        total += tl.load(part, mask=row[None, :] < rows, other=0.0, cache_modifier=".cg")
    return total
