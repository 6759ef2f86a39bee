"""NoPE multi-head latent attention of the generic path, in absorbed form over a paged latent cache (BF16 or FP8).

Prefill and decode attend to the same cached rows, so with an FP8 cache a prompt sees what decode will see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode_impl.generic.linear import projection, rms_norm
from numerics.formats import bf16, e4m3_decode, e4m3_encode


def quantise(x: Tensor, scale: float, like: Tensor) -> Tensor:
    """`x` in the dtype of the cache `like`: BF16, or saturating E4M3 bytes of `x / scale` (reciprocal multiply)."""
    return bf16(x) if like.dtype == torch.bfloat16 else e4m3_encode(x.float() * (1.0 / scale))


def widen(stored: Tensor) -> Tensor:
    """Stored elements (BF16, or E4M3 bytes without their scale) as f32."""
    return e4m3_decode(stored) if stored.dtype == torch.uint8 else stored.float()


def scale_product(stored: Tensor, *scales: float) -> float:
    """The product of `scales` where the stored elements are FP8; 1 where they are BF16 and carry none."""
    product = 1.0
    for scale in scales if stored.dtype == torch.uint8 else ():
        product *= scale
    return product


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
    """Normalise, expand and absorb the query; normalise the latent and write it to the cache.

    a: bf16 [n, q_rank + C + R]; q_b: [h*(nope+R), q_rank]; w_uk: [h, nope, C]; cache: [pages, page, C+R], written in
    place at `positions` (i64 [n], page * page_size + offset; inside page 0 = null, not written).
    Returns the query row [n, h, C+R] in the cache's dtype.
    """
    heads, nope, kv_rank = w_uk.shape
    q_c, kv_c, k_pe = a.split([a.shape[-1] - cache.shape[-1], kv_rank, cache.shape[-1] - kv_rank], dim=-1)
    latent = torch.cat([rms_norm(x=kv_c, weight=kv_norm_weight, eps=eps), k_pe], dim=-1)
    write_rows(cache, positions, quantise(latent, k_scale, cache))
    q = projection(x=rms_norm(x=q_c, weight=q_norm_weight, eps=eps), weight=q_b)
    q = q.unflatten(-1, (heads, nope + k_pe.shape[-1]))
    q_nope, q_rope = q.split([nope, q.shape[-1] - nope], dim=-1)
    absorbed = bf16(torch.einsum("nhp,hpc->nhc", q_nope.float(), w_uk.float()))
    return quantise(torch.cat([absorbed, q_rope], dim=-1), q_scale, cache)


def write_rows(cache: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Write `rows` at flat `positions` of a paged cache; positions inside page 0 are skipped."""
    live = (positions >= cache.shape[1]).nonzero().squeeze(-1)
    cache.view(-1, cache.shape[-1])[positions[live]] = rows[live]


def attend(q: Tensor, keys: Tensor, lengths: Tensor, softmax_scale: float, value_scale: float, kv_rank: int) -> Tensor:
    """Softmax attention of absorbed queries over latent rows, all FP32, one rounding at the end.

    q: f32 [n, h, C+R]; keys: f32 [n, L, C+R]; lengths: i64 [n] (0 gives zeros). Returns bf16 [n, h, C].
    """
    scores = q @ keys.transpose(-1, -2) * softmax_scale
    unseen = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
    # A masked row may hold anything, NaN included: it is removed, not multiplied by zero.
    values = keys[..., :kv_rank].masked_fill(unseen[..., None], 0.0)
    latent = bf16(weights @ values * value_scale)
    return latent.masked_fill((lengths == 0)[:, None, None], 0.0)


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
) -> Tensor:
    """One query row per request over its pages. Shapes as in docs/ops.md. Returns bf16 [n, h, C]."""
    pages = -(-int(lengths.max()) // cache.shape[1]) if lengths.numel() else 0
    keys = widen(cache[block_table[:, :pages]]).flatten(1, 2)
    scale = softmax_scale * scale_product(cache, q_scale, k_scale)
    return attend(widen(q), keys, lengths, scale, scale_product(cache, k_scale), kv_rank)


def mla_attend_sequence(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    start: int,
    softmax_scale: float,
    q_scale: float,
    k_scale: float,
    kv_rank: int,
) -> Tensor:
    """T consecutive query rows of one request, causal: row t sees `start + t + 1` keys. Returns bf16 [T, h, C]."""
    rows, heads = q.shape[:2]
    length = start + rows
    pages = -(-length // cache.shape[1])
    # The last page's tail may hold anything and is cut off; within the request only the causal mask is needed.
    keys = widen(cache[block_table[:pages]]).flatten(0, 1)[:length]
    scale = softmax_scale * scale_product(cache, q_scale, k_scale)
    scores = (widen(q).flatten(0, 1) @ keys.T).view(rows, heads, length) * scale
    future = torch.arange(length, device=q.device) > torch.arange(start, length, device=q.device)[:, None]
    weights = scores.masked_fill(future[:, None], -torch.inf).softmax(-1)
    latent = weights.flatten(0, 1) @ keys[:, :kv_rank] * scale_product(cache, k_scale)
    return bf16(latent).view(rows, heads, kv_rank)


def mla_value(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
    """Expand the latent to the value heads and gate it. latent: bf16 [n, h, C]; w_uv: [h, C, v]; gate: bf16 [n, h*v].

    Returns bf16 [n, h*v].
    """
    value = bf16(torch.einsum("nhc,hcv->nhv", latent.float(), w_uv.float())).flatten(1)
    return bf16(value.float() * torch.sigmoid(gate.float()))
