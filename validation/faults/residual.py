"""Faults of attention residuals and norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("residuals and norms")

MIX = partial(LAYER.op, "output_mix")
RES = partial(LAYER.op, "attn_res")
NORM = partial(LAYER.op, "rms_norm")

for _component in ("rms_norm", "attn_res", "output_mix"):

    @LAYER.op(
        _component,
        f"{_component.replace('_', '-')}-eps",
        f"epsilon of {_component} 1e-3 instead of 1e-5",
        kind=Kind.CONSTANT,
        sources="M82",
        missed_by="inputs of ordinary size",
    )
    def _eps(op: Any, *, eps: float, **rest: Any) -> Any:
        return op(eps=1e-3, **rest)


@MIX(
    "residual-prefix-kept",
    "a block-write layer adds to the prefix instead of starting it anew",
    kind=Kind.OPERAND,
    sources="M54",
    missed_by="models of fewer layers than a block",
)
def _kept(op: Any, *, replace_prefix: bool, **rest: Any) -> Any:
    return op(replace_prefix=False, **rest)


@MIX(
    "residual-bank-overwritten",
    "output written over the last row of the full bank",
    kind=Kind.OWNERSHIP,
    sources="M54",
    missed_by="models of few layers: the last block boundary alone shows it",
)
def _overwritten(op: Any, *, blocks: Tensor, num_blocks: int, **rest: Any) -> Any:
    prefix, mixed = op(blocks=blocks, num_blocks=num_blocks, **rest)
    if num_blocks == blocks.shape[1]:
        blocks[:, -1] = mixed
    return prefix, mixed


@RES(
    "attn-res-last-block-missing",
    "the newest block of the bank is left out of the mix",
    kind=Kind.INDEX,
    sources="kind of M54",
    missed_by="the first block of layers",
)
def _missing(op: Any, *, num_blocks: int, **rest: Any) -> Any:
    return op(num_blocks=max(0, num_blocks - 1), **rest)


@RES(
    "attn-res-unstarted-block",
    "a block that has not started is mixed in",
    kind=Kind.INDEX,
    sources="kind of M54",
    missed_by="banks of zeros that a query scores low",
)
def _unstarted(op: Any, *, num_blocks: int, blocks: Tensor, **rest: Any) -> Any:
    return op(num_blocks=min(blocks.shape[1], num_blocks + 1), blocks=blocks, **rest)


@RES(
    "attn-res-delta-dropped",
    "pending output of the last MLP not added",
    kind=Kind.DROPPED,
    sources="M55",
    missed_by="small outputs",
)
def _no_delta(op: Any, *, delta: Tensor | None = None, **rest: Any) -> Any:
    return op(delta=None, **rest)


@RES(
    "attn-res-tap-prefix",
    "the running prefix taken for the mixture",
    kind=Kind.OPERAND,
    sources="M55",
    missed_by="target logits, where only a drafter's taps read it",
)
def _tap(op: Any, *, num_blocks: int, **rest: Any) -> Any:
    return op(num_blocks=0, **rest)


@RES(
    "attn-res-query-weight-dropped",
    "source norms' weight left out of the query",
    kind=Kind.DROPPED,
    sources="kind of M82",
    missed_by="weights of one in the test",
)
def _query(op: Any, *, norm_weight: Tensor, **rest: Any) -> Any:
    return op(norm_weight=torch.ones_like(norm_weight), **rest)


@RES(
    "attn-res-out-norm-dropped",
    "weight of the mixture's output norm left out",
    kind=Kind.DROPPED,
    sources="kind of M82",
    missed_by="weights of one in the test",
)
def _out(op: Any, *, out_norm_weight: Tensor | None = None, **rest: Any) -> Any:
    return op(out_norm_weight=None if out_norm_weight is None else torch.ones_like(out_norm_weight), **rest)


@RES(
    "attn-res-blocks-reversed",
    "blocks read in the opposite order",
    kind=Kind.LAYOUT,
    sources="kind of M54",
    missed_by="nothing should see it",
    equivalent="a softmax mixture does not depend on the order of its sources: only the order of an FP32 sum changes",
)
def _reversed(op: Any, *, blocks: Tensor, num_blocks: int, **rest: Any) -> Any:
    return op(
        blocks=torch.cat([blocks[:, :num_blocks].flip(1), blocks[:, num_blocks:]], 1), num_blocks=num_blocks, **rest
    )


@NORM(
    "rms-norm-inverse-bf16",
    "1 / rms rounded to BF16 before it is applied",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="cosine",
)
def _inverse(op: Any, *, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    inverse = bf16((x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).float()
    return bf16(x.float() * inverse * weight.float())


@NORM(
    "rms-norm-double-rounding",
    "normalised row rounded to BF16 before the weight",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="tolerances of two BF16 steps",
)
def _double(op: Any, *, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return bf16(op(x=x, weight=torch.ones_like(weight), eps=eps).float() * weight.float())


@NORM(
    "rms-norm-last-element",
    "last element left out of the mean square",
    kind=Kind.INDEX,
    sources="M05",
    missed_by="rows of even size",
)
def _element(op: Any, *, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    square = x[..., :-1].float().square().sum(-1, keepdim=True) / x.shape[-1]
    return bf16(x.float() * (square + eps).rsqrt() * weight.float())


@NORM(
    "rms-norm-over-the-stride",
    "mean square over as many elements as lie between two rows",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="dense rows; gaps that hold zeros",
)
def _over_stride(op: Any, *, x: Tensor, **rest: Any) -> Any:
    y, (rows, width), stride = op(x=x, **rest), x.shape, x.stride(0)
    if rows > 1 and stride > width:
        gaps = x.as_strided((rows - 1, stride - width), (stride, 1), x.storage_offset() + width)
        y[:-1] += 0.0 * gaps.sum(-1, keepdim=True)
    return y


@NORM(
    "rms-norm-weight-unsigned",
    "sign of the norm's weight lost",
    kind=Kind.OPERAND,
    sources="kind of M82",
    missed_by="weights about one",
)
def _unsigned(op: Any, *, weight: Tensor, **rest: Any) -> Any:
    return op(weight=weight.abs(), **rest)
