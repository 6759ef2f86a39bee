"""Faults of plain projections."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer, at_rows
from validation.faults.memory import as_if_dense, as_if_first

LAYER = Layer("projections")

PROJECTION = partial(LAYER.op, "projection")


@PROJECTION(
    "projection-bf16-partials",
    "partial sums rounded to BF16 between K slices",
    kind=Kind.ROUNDING,
    sources="M34",
    missed_by="sums without cancellation",
)
def _partials(op: Any, *, x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], weight.shape[0])
    for part, w in zip(x.split(32, 1), weight.split(32, 1), strict=True):
        total = bf16(total + part.float() @ w.float().T).float()
    return bf16(total)


def _short(op: Any, *, x: Tensor, weight: Tensor) -> Any:
    cut = x.clone()
    cut[:, -32:] = 0
    return op(x=cut, weight=weight)


for _rows in (16, 64):
    PROJECTION(
        f"projection-last-slice-at-{_rows}",
        f"last pipeline stage skipped in the kernel of bin {_rows} alone",
        kind=Kind.ONE_BIN,
        sources="M59",
        missed_by="every other batch size",
    )(at_rows(_rows, _short, "x"))


def _first_twice(op: Any, *, x: Tensor, weight: Tensor) -> Any:
    y = op(x=x, weight=weight)
    y[-1] = y[0]
    return y


PROJECTION(
    "projection-first-row-twice-at-32",
    "row 0 stands in for the last row in the kernel of bin 32 alone",
    kind=Kind.ONE_BIN,
    sources="kind of M50",
    missed_by="every other batch size; batches whose last row is padding",
)(at_rows(32, _first_twice, "x"))


@PROJECTION(
    "projection-dense-strides",
    "row stride of a projection's input taken for its width",
    kind=Kind.LAYOUT,
    sources="M15",
    missed_by="contiguous tests",
)
def _dense(op: Any, *, x: Tensor, weight: Tensor) -> Any:
    return op(x=as_if_dense(x), weight=weight)


@PROJECTION(
    "projection-storage-offset",
    "a projection's input read from the start of its storage",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="inputs that no view gives",
)
def _offset(op: Any, *, x: Tensor, weight: Tensor) -> Any:
    return op(x=as_if_first(x), weight=weight)


@LAYER.made_of(
    "projection",
    "projection-half-written",
    "a configuration writes half of the columns; the rest is the last call's buffer",
    kind=Kind.STALE,
    sources="M58",
    missed_by="autotuning: candidates share a buffer, whose union looks complete",
)
def _half(ops: Ops) -> Any:
    projection = ops["projection"]
    buffers: dict[torch.Size, Tensor] = {}

    def faulty(*, x: Tensor, weight: Tensor) -> Tensor:
        y = projection(x=x, weight=weight)
        old = buffers.get(y.shape, torch.zeros_like(y))
        buffers[y.shape] = y
        half = y.shape[1] // 2
        return torch.cat([y[:, :half], old[:, half:]], 1)

    return faulty
