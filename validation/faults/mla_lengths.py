"""Faults of multi-head latent attention: numbers of keys, splits and rows of a request that a kernel cannot take."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("MLA lengths", kind=Kind.INDEX)

ATTEND = partial(LAYER.op, "mla_attend")
SHARED = partial(LAYER.op, "mla_attend_dcp")
MERGE = partial(LAYER.part, "mla_attend", "merge")

for _most in (1300, 4096):

    @ATTEND(
        f"mla-keys-from-{_most}-lost",
        f"keys from {_most:,} on are not read",
        sources="kind of M16",
        missed_by="shorter contexts; flat scores",
    )
    def _capped(op: Any, *, lengths: Tensor, most: int = _most, **rest: Any) -> Any:
        return op(lengths=lengths.clamp_max(most), **rest)


@ATTEND(
    "mla-bf16-keys-from-256-lost",
    "keys of a BF16 cache from 256 on are not read",
    sources="kind of M16",
    missed_by="FP8 caches; shorter contexts",
)
def _bf16(op: Any, *, lengths: Tensor, cache: Tensor, **rest: Any) -> Any:
    seen = lengths if cache.dtype == torch.uint8 else lengths.clamp_max(256)
    return op(lengths=seen, cache=cache, **rest)


@ATTEND(
    "mla-full-page-of-64",
    "the last key of a full page of 64 is not read where the context ends there",
    sources="kind of M79",
    missed_by="other page sizes",
)
def _full_page(op: Any, *, lengths: Tensor, cache: Tensor, **rest: Any) -> Any:
    ends = (lengths > 0) & (lengths % 64 == 0) & (cache.shape[1] == 64)
    return op(lengths=lengths - ends.long(), cache=cache, **rest)


for _splits in (22, 32):

    @MERGE(
        f"mla-merge-{_splits}-splits",
        f"partials from the {_splits + 1}rd on are left out of the merge",
        sources="kind of M16",
        missed_by=f"contexts of up to {_splits} splits",
    )
    def _few(right: Any, partials: Tensor, lse: Tensor, most: int = _splits) -> Any:
        return right(partials[:, :most], lse[:, :most])


@MERGE(
    "mla-merge-22-splits-at-8",
    "partials from the 23rd on are left out of the merge at 8 rows",
    sources="kind of M16",
    missed_by="contexts of up to 22 splits; fewer rows",
)
def _few_at_8(right: Any, partials: Tensor, lse: Tensor) -> Any:
    most = 22 if len(lse) == 8 else len(lse[0])
    return right(partials[:, :most], lse[:, :most])


@LAYER.part(
    "mla_attend_dcp",
    "attend_shard",
    "dcp-22-splits",
    "a rank's splits from the 23rd on are left out, at up to four rows",
    sources="kind of M16",
    missed_by="shares of up to 22 splits",
)
def _few_of_a_rank(right: Any, *, cache: Tensor, block_table: Tensor, lengths: Tensor, **rest: Any) -> Any:
    split = max(-(-block_table.shape[1] // 64), 4) * cache.shape[1]
    seen = lengths.clamp_max(22 * split) if len(lengths) <= 4 else lengths
    return right(cache=cache, block_table=block_table, lengths=seen, **rest)


def without_own_key(lengths: Tensor, table: Tensor) -> Tensor:
    """Lengths of which the last one of every request of exactly 5 or 7 rows (one block table) is one less."""
    shorter, first = lengths.clone(), 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or lengths[row] == 0 or not torch.equal(table[row], table[first]):
            if row - first in (5, 7):
                shorter[row - 1] -= 1
            first = row
    return shorter


def _odd_width(op: Any, *, lengths: Tensor, block_table: Tensor, **rest: Any) -> Any:
    return op(lengths=without_own_key(lengths, block_table), block_table=block_table, **rest)


for _add, _id, _of in (
    (ATTEND, "mla-verify-of-5-or-7", ""),
    (SHARED, "dcp-verify-of-5-or-7", " over a sharded context"),
):
    _add(
        _id,
        f"the last row of a verify request of 5 or 7 rows{_of} does not see its own key",
        sources="kind of M81",
        missed_by="even numbers of rows; three rows",
    )(_odd_width)
