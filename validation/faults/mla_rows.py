"""Faults of multi-head latent attention: where rows of the cache are written and read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind
from validation.faults.layer import Layer
from validation.faults.memory import as_if_dense, as_if_side_by_side, wrapped

LAYER = Layer("MLA cache rows")

QUERY = partial(LAYER.op, "mla_query")
ATTEND = partial(LAYER.op, "mla_attend")


@QUERY(
    "mla-record-order",
    "rope part written in front of the latent",
    kind=Kind.LAYOUT,
    sources="M31",
    missed_by="shape checks",
)
def _order(op: Any, **case: Any) -> Any:
    cache, positions = case["cache"], case["positions"]
    q = op(**case)
    rows = cache.view(-1, cache.shape[-1])
    live = positions[positions >= cache.shape[1]]
    rows[live] = rows[live].roll(cache.shape[-1] - case["w_uk"].shape[-1], -1)
    return q


@QUERY(
    "mla-null-page-written",
    "padded rows write the null page",
    kind=Kind.OWNERSHIP,
    sources="M27, M84, M91",
    missed_by="outputs; the generic writer alone",
)
def _null_page(op: Any, *, positions: Tensor, cache: Tensor, **rest: Any) -> Any:
    q = op(positions=positions, cache=cache, **rest)
    if bool((positions < cache.shape[1]).any()):
        cache[0, 0] = 1
    return q


@QUERY(
    "mla-write-off-by-one",
    "latent row written one place later",
    kind=Kind.INDEX,
    sources="kind of M32",
    missed_by="the query; a full cache of equal rows",
)
def _late(op: Any, *, positions: Tensor, cache: Tensor, **rest: Any) -> Any:
    last = cache.shape[0] * cache.shape[1] - 1
    live = positions >= cache.shape[1]
    return op(positions=torch.where(live, (positions + 1).clamp_max(last), positions), cache=cache, **rest)


@QUERY(
    "mla-row-offset-int32",
    "row times stride computed in 32 bits",
    kind=Kind.OVERFLOW,
    sources="M11, M12",
    missed_by="small pools: wraps at row 3.7 million of 576 bytes",
)
def _int32(op: Any, *, positions: Tensor, cache: Tensor, **rest: Any) -> Any:
    return op(positions=wrapped(positions, cache.shape[-1]), cache=cache, **rest)


@ATTEND(
    "mla-page-offset-int32",
    "page times stride computed in 32 bits although the pool is large",
    kind=Kind.OVERFLOW,
    sources="M12",
    missed_by="contiguous small pools",
)
def _page_int32(op: Any, *, block_table: Tensor, cache: Tensor, **rest: Any) -> Any:
    return op(block_table=wrapped(block_table, cache[0].numel()), cache=cache, **rest)


@LAYER.op(
    "mla_attend_dcp",
    "dcp-page-offset-int32",
    "page times stride computed in 32 bits in a rank's own pool",
    kind=Kind.OVERFLOW,
    sources="kind of M12",
    missed_by="small pools; large ones of one rank",
)
def _dcp_int32(op: Any, *, block_table: Tensor, cache: Any, **rest: Any) -> Any:
    return op(block_table=wrapped(block_table, cache[0][0].numel()), cache=cache, **rest)


@QUERY(
    "mla-dense-strides",
    "row stride of the MLA projection taken for its width",
    kind=Kind.LAYOUT,
    sources="M15",
    missed_by="contiguous tests",
)
def _dense(op: Any, *, a: Tensor, **rest: Any) -> Any:
    return op(a=as_if_dense(a), **rest)


@QUERY(
    "mla-nan-row-hidden",
    "clamped by a minimum and a maximum that drop a NaN: the latent is stored as the largest number",
    kind=Kind.MASK,
    sources="kind of M22",
    missed_by="queries, which are NaN; a cast of what is not normalised",
)
def _row_cleaned(op: Any, *, cache: Tensor, w_uk: Tensor, **rest: Any) -> Any:
    q, latent = op(cache=cache, w_uk=w_uk, **rest), cache[..., : w_uk.shape[2]]
    if cache.dtype == torch.uint8:
        latent[latent & 0x7F == 0x7F] = 0x7E
    else:
        latent.copy_(latent.nan_to_num())
    return q


@QUERY(
    "mla-row-padding-zeroed",
    "the last vector of a row is stored whole, with zeros behind the row",
    kind=Kind.OWNERSHIP,
    sources="kind of M50",
    missed_by="dense caches; gaps that hold zeros",
)
def _padding_zeroed(op: Any, *, cache: Tensor, **rest: Any) -> Any:
    q, width = op(cache=cache, **rest), cache.shape[2]
    if cache.stride(1) > width:
        first = cache.storage_offset() + width
        cache.as_strided((1, cache.stride(1) - width), (1, 1), first).zero_()
    return q


@ATTEND(
    "mla-pages-side-by-side",
    "stride of a page taken for its rows'",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="pools of one layer; gaps between rows alone",
)
def _side_by_side(op: Any, *, cache: Tensor, **rest: Any) -> Any:
    return op(cache=as_if_side_by_side(cache), **rest)
