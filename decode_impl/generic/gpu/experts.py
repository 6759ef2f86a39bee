"""Routed experts as grouped products: order the pairs by expert, FC1, SiTU, FC2, sum over slots. Five launches.

- Arguments and contract are the plain op's (`generic/moe.py`). A *pair* is one slot of one row; blocks of up to `PAIRS`
  pairs of one expert share one read of its weights. No count is read on the host, so a step can be captured.
- MXFP4 codes are widened in registers by the tile product of the specialised path (`mxfp4_dot`): BF16 copies of all
  experts would be four times the memory, and no grouped product of torch takes MXFP4 on SM90.
- Rounded to BF16: hidden, each slot's result, the latent. Scratch: gate and up f32 [n*k, 2I]; results bf16 [n*k, L].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.generic.gpu.linear import activated
from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.specialized.kernels.common import bf16, f32
from decode_impl.specialized.kernels.mxfp4 import mxfp4_dot, scale_factors

_FEW_PAIRS, _MANY_PAIRS = 8, 32
"""Pairs of a block: in a decode step most experts have one or two, in a prompt there are many."""

_SORTED_AT_ONCE = 1024
"""Pairs that one launch can order; beyond that torch sorts."""


@triton.jit
def order_kernel(ids_ptr, order_ptr, work_ptr, pairs, ALL: tl.constexpr, OWN: tl.constexpr, PAIRS: tl.constexpr):
    """Grid (pairs / OWN,): each pair finds its place by counting those that come before it."""
    every, own = tl.arange(0, ALL), tl.program_id(0) * OWN + tl.arange(0, OWN)
    others = tl.load(ids_ptr + every, mask=every < pairs, other=1 << 30).to(tl.int32)[None, :]
    mine = tl.load(ids_ptr + own, mask=own < pairs, other=1 << 30).to(tl.int32)[:, None]
    same = others == mine
    rank = tl.sum((same & (every[None, :] < own[:, None])).to(tl.int32), 1)
    place = rank + tl.sum((others < mine).to(tl.int32), 1)
    left = tl.sum(same.to(tl.int32), 1) - rank
    tl.store(order_ptr + place, own, mask=own < pairs)
    tl.store(work_ptr + place, tl.where(rank % PAIRS == 0, tl.minimum(left, PAIRS), 0), mask=own < pairs)


def ordered(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, and the pairs of the block that begins at each place (0 where none does), i32 [n*k] each."""
    flat = ids.flatten()
    pairs = len(flat)
    if pairs <= _SORTED_AT_ONCE:
        order, work = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
        order_kernel[triton.cdiv(pairs, 16),](
            flat, order, work, pairs, ALL=triton.next_power_of_2(pairs), OWN=16, PAIRS=block, num_warps=4
        )
        return order, work
    chosen, by_expert = flat.sort(stable=True)
    place = torch.arange(pairs, device=ids.device)
    rank = place - torch.searchsorted(chosen, chosen)
    left = torch.searchsorted(chosen, chosen, right=True) - place
    return by_expert.int(), torch.where(rank % block == 0, left.clamp(max=block), 0).int()


@triton.jit
def grouped_kernel(
    x_ptr,
    ids_ptr,
    order_ptr,
    work_ptr,
    codes_ptr,
    scale_ptr,
    out_ptr,
    outputs,
    x_stride,
    COLUMNS: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of the outputs, pairs): a block of pairs times BLOCK_N rows of their expert's matrix."""
    tile, place = tl.program_id(0), tl.program_id(1)
    count = tl.load(work_ptr + place)
    if count > 0:
        i, n = tl.arange(0, PAIRS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + place + tl.where(i < count, i, 0)).to(tl.int64)
        expert = tl.load(ids_ptr + tl.sum(tl.where(i == 0, pair, 0)))
        row = expert.to(tl.int64) * outputs + tl.minimum(n, outputs - 1)
        words: tl.constexpr = BLOCK_K // 8
        word, scales = tl.arange(0, words), tl.arange(0, words // 4)
        codes = codes_ptr.to(tl.pointer_type(tl.int32)) + row[:, None] * (CODE_STRIDE // 4) + word[None, :]
        scale = scale_ptr + row[:, None] * SCALE_STRIDE + scales[None, :]
        x = x_ptr + (pair // PAIRS_PER_ROW)[None, :] * x_stride + word[:, None] * 8
        acc = tl.zeros([BLOCK_N, PAIRS], tl.float32)
        for start in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
            left = COLUMNS - start
            if COLUMNS % BLOCK_K == 0:
                w = tl.load(codes + start // 8)
                s = tl.load(scale + start // 32)
            else:
                w = tl.load(codes + start // 8, mask=(8 * word < left)[None, :], other=0)
                s = tl.load(scale + start // 32, mask=(32 * scales < left)[None, :], other=0)
            factor = scale_factors(s, BLOCK_N, words)
            acc = mxfp4_dot(w, factor, x + start, left - word[:, None] * 8, acc, COLUMNS % BLOCK_K == 0)
        inside = (n < outputs)[:, None] & (i < count)[None, :]
        to = out_ptr + pair[None, :] * outputs + n[:, None]
        if out_ptr.dtype.element_ty == tl.float32:
            tl.store(to, acc, mask=inside)
        else:
            tl.store(to, bf16(acc), mask=inside)


def grouped(
    x: Tensor,
    ids: Tensor,
    groups: tuple[Tensor, Tensor],
    weight: MXFP4Weight,
    columns: int,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """Every pair's row of `x` (bf16, one row for each pair or for each token) times its expert's matrix.

    Returns `dtype` [n*k, out].
    """
    pairs, outputs = ids.numel(), weight.out_features
    per_row = pairs // len(x)
    out = torch.empty(pairs, outputs, dtype=dtype, device=x.device)
    block_n = 64 if pairs <= 64 else 128
    grouped_kernel[triton.cdiv(outputs, block_n), pairs](
        x, ids, *groups, weight.packed, weight.scale, out, outputs, x.stride(0), COLUMNS=columns,
        CODE_STRIDE=weight.packed.shape[2], SCALE_STRIDE=weight.scale.shape[2], PAIRS_PER_ROW=per_row, PAIRS=block,
        BLOCK_N=block_n, BLOCK_K=128 if columns % 256 else 256, STAGES=4, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def slot_sum_kernel(results_ptr, weights_ptr, out_ptr, weights_stride, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, tiles of L): the weighted sum over slots 0, 1, ... in FP32."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        x = f32(tl.load(results_ptr + (row * TOP_K + slot) * width + i, mask=inside, other=0.0))
        total += x * tl.load(weights_ptr + row * weights_stride + slot)
    tl.store(out_ptr + row * width + i, bf16(total), mask=inside)


def experts(
    *,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: MXFP4Weight,
    w2: MXFP4Weight,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """This rank's share of the routed experts, bf16 [n, L]."""
    rows, top_k, width = len(z), ids.shape[1], w13.out_features // 2
    out = torch.empty(rows, w2.out_features, dtype=torch.bfloat16, device=z.device)
    if not rows or not width:
        return out.zero_()
    ids = ids.contiguous()
    block = _FEW_PAIRS if ids.numel() <= 4 * _SORTED_AT_ONCE else _MANY_PAIRS
    groups = ordered(ids, block)
    gate_up = grouped(z, ids, groups, w13, z.shape[1], block, torch.float32)
    results = grouped(activated(gate_up, beta, linear_beta), ids, groups, w2, width, block, torch.bfloat16)
    tile = 256
    slot_sum_kernel[rows, triton.cdiv(out.shape[1], tile)](
        results, weights, out, weights.stride(0), out.shape[1], TOP_K=top_k, BLOCK=tile, num_warps=2
    )
    return out
