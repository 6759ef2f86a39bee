"""The router in one launch: sigmoid, biased top-k with ties to the lower expert, weights from the unbiased scores.

- logits: f32 [n, E], rows at any stride; bias: f32 [E]. Returns ids i64 [n, k] by falling biased score and weights
  f32 [n, k]. A row of NaNs gets ids in range; its weights are NaN.
- One CTA a row, `k` rounds: the largest that is left, by the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.config import ROUTER_SUM_EPS
from decode_impl.specialized.kernels.common import f32, sigmoid


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    sum_eps,
    logits_stride,
    experts,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < experts
    logits = f32(tl.load(logits_ptr + row * logits_stride + i, mask=inside, other=0.0))
    scores = sigmoid(logits)
    left = tl.where(inside, scores + f32(tl.load(bias_ptr + i, mask=inside, other=0.0)), float("-inf"))
    # A row with a NaN has no order; any ids will do, and its weights are NaN.
    left = tl.where(left == left, left, tl.where(inside, 0.0, float("-inf")))
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left), i, BLOCK))
        score = tl.sum(tl.where(i == best, scores, 0.0))
        ids = tl.where(slot == k, best, ids)
        chosen = tl.where(slot == k, score, chosen)
        left = tl.where(i == best, float("-inf"), left)
    weights = chosen / (tl.sum(chosen) + sum_eps) * scaling
    tl.store(ids_ptr + row * TOP_K + slot, ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)


def route(*, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of every row and their weights, which sum to `scaling`."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[rows,](
            logits, bias, ids, weights, scaling, ROUTER_SUM_EPS, logits.stride(0), experts, TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k), BLOCK=triton.next_power_of_2(experts), num_warps=4,
        )  # fmt: skip
    return ids, weights
