"""Decode context parallelism (DCP): which rank holds which token, and how ranks' partial attentions become one.

The token at position p of a request belongs to rank p % ranks, and is that rank's local token p // ranks. So at every
length the ranks' shares differ by one key at most, a rank's keys lie in the order of their positions, and what a query
row may see of a rank is a prefix of them: a causal bound is a local length, and needs no mask. A page is one id and one
entry of a block table for all ranks; each rank has `page_size` rows of it in a pool of its own, so that it holds
`page_size * ranks` tokens of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EMPTY = -3.0e38
"""Log-sum-exp of a rank that holds no key a row may see: finite, so that no inf - inf arises and its weight is 0."""


def owner(position: int, ranks: int) -> int:
    """The rank that holds the token at `position` of its request."""
    return position % ranks


def local_lengths(lengths: Tensor, rank: int, ranks: int) -> Tensor:
    """Of the first `lengths` tokens of each request, how many `rank` holds: i64, of `lengths`' shape."""
    return (lengths - rank + ranks - 1) // ranks


def local_positions(positions: Tensor, page_size: int, rank: int, ranks: int) -> Tensor:
    """Flat positions in `rank`'s own pool of tokens at flat positions (page * page_size * ranks + offset), i64 [n].

    A token that another rank holds, and a null one, gets 0, a position inside the null page: it is not written.
    """
    page_tokens = page_size * ranks
    page, offset = positions // page_tokens, positions % page_tokens
    return torch.where(offset % ranks == rank, page * page_size + offset // ranks, 0)


def in_order(shards: Sequence[Tensor]) -> Tensor:
    """The rows of one request's pages, every rank's [rows, ...], in the order of their tokens: [ranks * rows, ...]."""
    return torch.stack(list(shards), dim=1).flatten(0, 1)


def merge(partials: Tensor, lse: Tensor) -> Tensor:
    """Join the ranks' normalised rows by their base-2 log-sum-exps, in FP32, ranks in order.

    partials: f32 [n, ranks, h, C]; lse: f32 [n, ranks, h], `EMPTY` for a rank without keys. Returns f32 [n, h, C].
    """
    weights = torch.exp2(lse - lse.amax(1, keepdim=True))
    total, weight = partials[:, 0] * weights[:, 0, :, None], weights[:, 0]
    for rank in range(1, partials.shape[1]):
        total = total + partials[:, rank] * weights[:, rank, :, None]
        weight = weight + weights[:, rank]
    return total / weight[..., None]
