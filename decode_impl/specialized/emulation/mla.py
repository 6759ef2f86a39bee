"""Emulated MLA kernels: query front with cache write, split-KV decode with an LSE merge, value back.

Scores are kept in base 2. Every split ends in a normalised partial and its base-2 log-sum-exp; the merge weighs
partials by `exp2(lse - max)`. A split that sees no key has the finite sentinel EMPTY as its log-sum-exp,
so no inf - inf can arise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decode_impl.parallel.context import EMPTY
from decode_impl.specialized.contract import KV_BLOCK, split_pages
from decode_impl.specialized.emulation.elementary import exp2, log2, sigmoid
from decode_impl.specialized.emulation.projection import projection, rms_norm
from numerics.formats import bf16, e4m3_decode, e4m3_encode

LOG2E = 1.4426950408889634


def mla_query(
    *,
    a: Tensor,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    eps: float,
    q_b: Tensor,
    w_uk: Tensor,
    q_scale: float,
    k_scale: float,
    cache: Tensor,
    positions: Tensor,
) -> Tensor:
    """Norms, Q_B, W_UK absorb, quantised query and latent row, written in place. Shapes as in docs/ops.md."""
    heads, nope, kv_rank = w_uk.shape
    row = cache.shape[-1]
    q_c, kv_c, k_pe = a.split([a.shape[-1] - row, kv_rank, row - kv_rank], dim=-1)
    fp8 = cache.dtype == torch.uint8

    kv_n = rms_norm(x=kv_c, weight=kv_norm_weight, eps=eps)
    latent = torch.cat([kv_n, k_pe], dim=-1)
    live = (positions >= cache.shape[1]).nonzero().squeeze(-1)
    stored = e4m3_encode(latent.float() * (1.0 / k_scale)) if fp8 else latent
    cache.view(-1, row)[positions[live]] = stored[live]

    q = projection(x=rms_norm(x=q_c, weight=q_norm_weight, eps=eps), weight=q_b)
    q = q.view(a.shape[0], heads, nope + row - kv_rank)
    absorbed = bf16((q[..., :nope].transpose(0, 1).float() @ w_uk.float()).transpose(0, 1))
    query = torch.cat([absorbed, q[..., nope:]], dim=-1)
    return e4m3_encode(query.float() * (1.0 / q_scale)) if fp8 else query


def merge(partials: Tensor, lse: Tensor) -> Tensor:
    """Join normalised partials by their base-2 log-sum-exps. partials: f32 [n, S, h, C]; lse: f32 [n, S, h].

    Returns f32 [n, h, C].
    """
    weights = exp2(lse - lse.amax(1, keepdim=True))
    total, weight = partials[:, 0] * weights[:, 0, :, None], weights[:, 0]
    for split in range(1, partials.shape[1]):
        total = torch.addcmul(total, partials[:, split], weights[:, split, :, None])
        weight = weight + weights[:, split]
    return total / weight[..., None]


def running_top(scores: Tensor) -> Tensor:
    """Per key, the largest score of its block of `KV_BLOCK` keys and of those before it. scores: f32 [..., keys]."""
    keys = scores.shape[-1]
    blocks = torch.nn.functional.pad(scores, (0, -keys % KV_BLOCK), value=EMPTY).unflatten(-1, (-1, KV_BLOCK))
    top: Tensor = blocks.amax(-1).cummax(-1).values
    return top.repeat_interleave(KV_BLOCK, -1)[..., :keys]


def attend_splits(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, base2_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor]:
    """Normalised partials f32 [n, S, h, C] of every split of the context, and their base-2 log-sum-exps f32 [n, S, h].

    A split without keys has zeros and `EMPTY`. Numerators are rounded to BF16 for the value product, relative to the
    largest score so far; their sum is not rounded. The split length follows from the width of `block_table` (the
    engine's context limit) and the batch bin alone.
    """
    rows, page = q.shape[0], cache.shape[1]
    fp8 = cache.dtype == torch.uint8
    pages_per_split = split_pages(block_table.shape[1], rows)
    split_length = pages_per_split * page
    splits = max(1, -(-int(lengths.max()) // split_length))
    table = torch.nn.functional.pad(block_table, (0, max(0, splits * pages_per_split - block_table.shape[1])))
    stored = cache[table[:, : splits * pages_per_split]].view(rows, splits, split_length, -1)
    keys = e4m3_decode(stored) if fp8 else stored.float()
    query = e4m3_decode(q) if fp8 else q.float()

    seen = torch.arange(splits * split_length, device=q.device).view(splits, split_length) < lengths[:, None, None]
    scores = (query[:, None] @ keys.transpose(-1, -2)) * base2_scale
    scores = scores.masked_fill(~seen[:, :, None], EMPTY)
    so_far = running_top(scores)
    top = so_far[..., -1:]
    p = exp2(scores - so_far).masked_fill(~seen[:, :, None], 0.0)
    rescale = exp2(so_far - top)
    total = (p * rescale).sum(-1)
    values = keys[..., :kv_rank].masked_fill(~seen[..., None], 0.0)
    products = (bf16(p).float() * rescale) @ values
    partials = products / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return partials, torch.where(total > 0, top.squeeze(-1) + log2(total), EMPTY)


def mla_attend(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    q_scale: float,
    k_scale: float,
    kv_rank: int,
    merge: Callable[[Tensor, Tensor], Tensor] = merge,
) -> Tensor:
    """Split-KV decode. Shapes as in docs/ops.md. Part: `merge`. Returns bf16 [n, h, C]."""
    fp8 = cache.dtype == torch.uint8
    base2_scale = softmax_scale * LOG2E * (q_scale * k_scale if fp8 else 1.0)
    partials, lse = attend_splits(q, cache, block_table, lengths, base2_scale, kv_rank)
    latent = bf16(merge(partials, lse) * (k_scale if fp8 else 1.0))
    return latent.masked_fill((lengths == 0)[:, None, None], 0.0)


def mla_value(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
    """W_UV, one rounding, times sigmoid(gate), one rounding. Shapes as in docs/ops.md. Returns bf16 [n, h*v]."""
    value = bf16((latent.transpose(0, 1).float() @ w_uv.float()).transpose(0, 1)).flatten(1)
    return bf16(value.float() * sigmoid(gate.float()))
