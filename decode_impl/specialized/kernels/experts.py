"""Routed experts in MXFP4, W4A16: grouping, FC1 with SiTU, FC2, sum over slots. Two launches for one row, four above.

- z: bf16 [n, L], rows at any stride; ids: i64 [n, k], distinct within a row; weights: f32 [n, k].
- w13: codes u8 [E, 2I, L/2], gate rows first, scales u8 [E, 2I, L/32]; w2: [E, L, I'/2] and [E, L, I'/32], I' >= I;
  what lies beyond I in w2's last word of 8 codes is multiplied by zero, what lies beyond that is never read,
  nor is an expert that no row chose.
- latent: bf16 [n, L], fully written.
- Scratch: hidden bf16 [n*k, I]; results bf16 [n*k, L]; FC1's split-K partials where few tokens would leave
  multiprocessors idle.
- Rounded to BF16: hidden, each slot's result, and the latent. The sum over slots is FP32, in slot order.
- One row: of the CTAs that compute its slots, the one that arrives last at a tile of L adds them, in slot order.
- A *pair* is one slot of one row. Pairs of one expert are computed together, 8 to a block, so that its weights are
  read once per block: the order is by expert, then by pair. Who else is in a block changes no bit of a pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.kernels.common import bf16, counters, f32, padded_rows, situ
from decode_impl.specialized.kernels.mxfp4 import mxfp4_dot, scale_factors
from decode_impl.specialized.kernels.split_k import arrived_last, collect, publish, slices

_PAIRS = 8
"""Pairs of a block: the least that a tensor core takes; in a spread routing most experts have one or two."""

_BLOCK_N = 128
_BLOCK_K = 256


@triton.jit
def group_kernel(ids_ptr, order_ptr, work_ptr, pairs, ALL: tl.constexpr, OWN: tl.constexpr, PAIRS: tl.constexpr):
    """Grid (pairs / OWN,). A stable counting sort: each pair counts those before it.

    order[i]: the pair at sorted place i. work[i]: pairs of the block that begins there, 0 where none begins.
    """
    every = tl.arange(0, ALL)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    all_ids = tl.load(ids_ptr + every, mask=every < pairs, other=1 << 30).to(tl.int32)
    own_ids = tl.load(ids_ptr + own, mask=own < pairs, other=1 << 30).to(tl.int32)
    same = all_ids[None, :] == own_ids[:, None]
    rank = tl.sum((same & (every[None, :] < own[:, None])).to(tl.int32), 1)
    place = rank + tl.sum((all_ids[None, :] < own_ids[:, None]).to(tl.int32), 1)
    left = tl.sum(same.to(tl.int32), 1) - rank
    tl.store(order_ptr + place, own, mask=own < pairs)
    work = tl.where(rank % PAIRS == 0, tl.minimum(left, PAIRS), 0)
    tl.store(work_ptr + place, work, mask=own < pairs)


@triton.jit
def _block(order_ptr, work_ptr, place, PAIRS: tl.constexpr, GROUPED: tl.constexpr):
    """Number of pairs of the block at `place`, and the pairs; those beyond the number repeat the first."""
    i = tl.arange(0, PAIRS)
    if GROUPED:
        count = tl.load(work_ptr + place)
        pair = tl.load(order_ptr + place + tl.where(i < count, i, 0))
    else:
        count = 1
        pair = i * 0 + place
    return count, pair


@triton.jit
def fc1_kernel(
    z_ptr,
    ids_ptr,
    order_ptr,
    work_ptr,
    codes_ptr,
    scale_ptr,
    hidden_ptr,
    part_ptr,
    counter_ptr,
    beta,
    linear_beta,
    z_stride,
    width,
    LATENT: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPED: tl.constexpr,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of BLOCK_N / 2 hidden columns, splits of L, blocks). A tile alternates rows of gate and up."""
    tile, split, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, pair = _block(order_ptr, work_ptr, place, PAIRS, GROUPED)
    if count > 0:
        i = tl.arange(0, BLOCK_N)
        n = tl.minimum(tile * (BLOCK_N // 2) + i // 2, width - 1) + (i % 2) * width
        row = _expert(ids_ptr, pair, PAIRS) * (2 * width) + n
        z = z_ptr + (pair // TOP_K).to(tl.int64)[None, :] * z_stride
        acc = _product(
            z, codes_ptr, scale_ptr, row, split * SLICE, SLICE, LATENT, LATENT // 2, LATENT // 32, PAIRS, BLOCK_N,
            BLOCK_K, STAGES, LATENT == SLICE * SPLITS,
        )  # fmt: skip
        if SPLITS == 1:
            _store_hidden(acc, hidden_ptr, pair, count, tile, width, beta, linear_beta, PAIRS, BLOCK_N)
        else:
            at = place * TILES + tile
            publish(acc, count, part_ptr, at, split, PAIRS, BLOCK_N, SPLITS)
            if arrived_last(counter_ptr, at, SPLITS):
                acc = collect(count, part_ptr, at, PAIRS, BLOCK_N, SPLITS)
                _store_hidden(acc, hidden_ptr, pair, count, tile, width, beta, linear_beta, PAIRS, BLOCK_N)


@triton.jit
def _expert(ids_ptr, pair, PAIRS: tl.constexpr):
    """The expert of a block, that of its first pair."""
    return tl.load(ids_ptr + tl.sum(tl.where(tl.arange(0, PAIRS) == 0, pair, 0)))


@triton.jit
def _product(
    x,
    codes_ptr,
    scale_ptr,
    row,
    first,
    SLICE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """FP32 [BLOCK_N, PAIRS]: weight rows `row` (i64) times the pairs, over SLICE columns from `first`.

    `x` [1, PAIRS] points at each pair's first column.
    """
    words: tl.constexpr = BLOCK_K // 8
    word, block = tl.arange(0, words), tl.arange(0, words // 4)
    codes = codes_ptr.to(tl.pointer_type(tl.int32)) + row[:, None] * (CODE_STRIDE // 4) + first // 8 + word[None, :]
    scale = scale_ptr + row[:, None] * SCALE_STRIDE + first // 32 + block[None, :]
    batch = x + first + word[:, None] * 8
    acc = tl.zeros([BLOCK_N, PAIRS], tl.float32)
    for start in tl.range(0, SLICE, BLOCK_K, num_stages=STAGES):
        left = COLUMNS - first - start
        if EVEN_K:
            w = tl.load(codes + start // 8)
            s = tl.load(scale + start // 32)
        else:
            w = tl.load(codes + start // 8, mask=(8 * word < left)[None, :], other=0)
            s = tl.load(scale + start // 32, mask=(32 * block < left)[None, :], other=0)
        factor = scale_factors(s, BLOCK_N, words)
        acc = mxfp4_dot(w, factor, batch + start, left - word[:, None] * 8, acc, EVEN_K)
    return acc


@triton.jit
def _store_hidden(
    acc, hidden_ptr, pair, count, tile, width, beta, linear_beta, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr
):
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N // 2, 2, PAIRS]), [0, 2, 1]))
    n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    inside = (tl.arange(0, PAIRS) < count)[None, :] & (n < width)[:, None]
    hidden = hidden_ptr + pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(hidden, bf16(situ(gate, up, beta, linear_beta)), mask=inside)


@triton.jit
def fc2_kernel(
    hidden_ptr,
    ids_ptr,
    order_ptr,
    work_ptr,
    codes_ptr,
    scale_ptr,
    result_ptr,
    weights_ptr,
    out_ptr,
    counter_ptr,
    latent,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of L, blocks)."""
    tile, place = tl.program_id(0), tl.program_id(1)
    count, pair = _block(order_ptr, work_ptr, place, PAIRS, GROUPED)
    if count > 0:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        row = _expert(ids_ptr, pair, PAIRS) * latent + tl.minimum(n, latent - 1)
        hidden = hidden_ptr + pair.to(tl.int64)[None, :] * WIDTH
        blocks: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
        acc = _product(
            hidden, codes_ptr, scale_ptr, row, 0, blocks * BLOCK_K, WIDTH, CODE_STRIDE, SCALE_STRIDE, PAIRS, BLOCK_N,
            BLOCK_K, STAGES, WIDTH % BLOCK_K == 0,
        )  # fmt: skip
        inside = (tl.arange(0, PAIRS) < count)[None, :] & (n < latent)[:, None]
        tl.store(result_ptr + pair.to(tl.int64)[None, :] * latent + n[:, None], bf16(acc), mask=inside)
        # Apart, so that the counter is compiled in for one row alone.
        if not GROUPED:  # noqa: SIM102
            if arrived_last(counter_ptr, tile, TOP_K):
                _add_slots(result_ptr, weights_ptr, out_ptr, n, latent, TOP_K, BLOCK_N, ".cg")


@triton.jit
def _add_slots(
    result_ptr, weights_ptr, out_ptr, i, latent, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """The weighted sum over the slots of one row, in slot order, at columns `i`."""
    inside = i < latent
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        x = f32(tl.load(result_ptr + slot * latent + i, mask=inside, other=0.0, cache_modifier=CACHE))
        total += x * tl.load(weights_ptr + slot)
    tl.store(out_ptr + i, bf16(total), mask=inside)


@triton.jit
def slots_kernel(result_ptr, weights_ptr, out_ptr, weights_stride, latent, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, tiles of L)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    results, weights = result_ptr + row * TOP_K * latent, weights_ptr + row * weights_stride
    _add_slots(results, weights, out_ptr + row * latent, i, latent, TOP_K, BLOCK, "")


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
    """This rank's share of the routed experts, bf16 [n, L]. Contract: module docstring."""
    rows, latent = z.shape
    top_k, width = ids.shape[1], w13.out_features // 2
    out = torch.empty(rows, latent, dtype=torch.bfloat16, device=z.device)
    if not width:
        return out.zero_()
    pairs, ids, grouped = rows * top_k, ids.contiguous(), rows > 1
    order = torch.empty(pairs if grouped else 0, dtype=torch.int32, device=z.device)
    work = torch.empty_like(order)
    if grouped:
        group_kernel[triton.cdiv(pairs, 16),](
            ids, order, work, pairs, ALL=triton.next_power_of_2(pairs), OWN=16, PAIRS=_PAIRS, num_warps=4
        )
    hidden = torch.empty(pairs, width, dtype=torch.bfloat16, device=z.device)
    tiles = triton.cdiv(width, _BLOCK_N // 2)
    splits, per_slice = slices(tiles * batch_bin(rows) * top_k, triton.cdiv(latent, _BLOCK_K), padded_rows(rows))
    size = pairs * tiles * splits * _PAIRS * _BLOCK_N if splits > 1 else 0
    fc1_kernel[tiles, splits, pairs](
        z,
        ids,
        order,
        work,
        w13.packed,
        w13.scale,
        hidden,
        torch.empty(size, dtype=torch.float32, device=z.device),
        counters(z, pairs * tiles),
        beta,
        linear_beta,
        z.stride(0),
        width,
        LATENT=latent,
        TOP_K=top_k,
        GROUPED=grouped,
        TILES=tiles,
        PAIRS=_PAIRS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        SPLITS=splits,
        SLICE=per_slice * _BLOCK_K,
        STAGES=4,
        num_warps=4,
    )
    results = torch.empty(pairs, latent, dtype=torch.bfloat16, device=z.device)
    fc2_kernel[triton.cdiv(latent, _BLOCK_N), pairs](
        hidden,
        ids,
        order,
        work,
        w2.packed,
        w2.scale,
        results,
        weights,
        out,
        counters(z, triton.cdiv(latent, _BLOCK_N)),
        latent,
        TOP_K=top_k,
        WIDTH=width,
        CODE_STRIDE=w2.packed.shape[2],
        SCALE_STRIDE=w2.scale.shape[2],
        GROUPED=grouped,
        PAIRS=_PAIRS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=128 if width % 128 == 0 else _BLOCK_K,
        STAGES=4,
        num_warps=4,
    )
    if grouped:
        block = 256
        slots_kernel[rows, triton.cdiv(latent, block)](
            results, weights, out, weights.stride(0), latent, TOP_K=top_k, BLOCK=block, num_warps=2
        )
    return out
