"""The exact router: sigmoid, the k largest biased scores, normalised weights. One CTA a row.

- logits: f32 [n, E], rows at any stride; bias: f32 [E].
- ids: i64 [n, k] by falling biased score, ties to the lower id; weights: f32 [n, k]; both fully written.
- Nothing is rounded to BF16. The chosen scores are summed in one tree over the slots.
- A row with NaN logits gets ids in range; its weights mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.config import ROUTER_SUM_EPS
from decode_impl.specialized.kernels.common import sigmoid


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    sum_eps,
    stride,
    experts,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,): the k largest of distinct keys, by a bitonic network."""
    row = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = e < experts
    scores = sigmoid(tl.load(logits_ptr + row * stride + e, mask=inside, other=0.0))
    ranking = scores + tl.load(bias_ptr + e, mask=inside, other=0.0)
    # A NaN compares with nothing; below every number it still leaves the lower ids in front of the padding.
    ranking = tl.where(inside & (ranking == ranking), ranking, float("-inf"))
    best = tl.topk(_keys(ranking, e), SLOTS)
    ids = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
    ids = tl.where(slot < TOP_K, ids, 0)
    chosen = sigmoid(tl.load(logits_ptr + row * stride + ids))
    chosen = tl.where(slot < TOP_K, chosen, 0.0)
    weights = chosen * tl.math.div_rn(scaling, tl.sum(chosen, 0) + sum_eps)
    tl.store(ids_ptr + row * TOP_K + slot, ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)


@triton.jit
def _keys(ranking, e):
    """Integers in the order of (ranking, lower id first), all different: sortable bits above, 2^31 - 1 - id below."""
    bits = (ranking + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * 2147483648 + (0x7FFFFFFF - e).to(tl.int64)


def route(*, logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """(ids i64 [n, k], weights f32 [n, k]). Contract: module docstring."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    route_kernel[rows,](
        logits,
        bias,
        ids,
        weights,
        float(scaling),
        ROUTER_SUM_EPS,
        logits.stride(0),
        experts,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=4,
    )
    return ids, weights
