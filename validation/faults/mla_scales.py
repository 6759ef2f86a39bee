"""Faults of multi-head latent attention: FP8 scales and casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import E4M3_NAN, bf16, e4m3_decode, e4m3_encode
from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("MLA scales")

QUERY = partial(LAYER.op, "mla_query")
ATTEND = partial(LAYER.op, "mla_attend")


@ATTEND(
    "mla-fp8-scale-dropped",
    "FP8 key scale dropped in decode attention",
    kind=Kind.SCALE,
    sources="M23, M24",
    missed_by="a scale of 1: the error is exactly 0",
)
def _dropped(op: Any, *, k_scale: float, **rest: Any) -> Any:
    return op(k_scale=1.0, **rest)


@QUERY(
    "mla-fp8-scale-not-written",
    "latent rows written to the FP8 cache without their scale",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a scale of 1",
)
def _unscaled(op: Any, *, k_scale: float, **rest: Any) -> Any:
    return op(k_scale=1.0, **rest)


@QUERY(
    "mla-query-scale-dropped",
    "query cast to FP8 without its scale",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a scale of 1",
)
def _query_unscaled(op: Any, *, q_scale: float, **rest: Any) -> Any:
    return op(q_scale=1.0, **rest)


@ATTEND(
    "mla-scale-twice",
    "key scale applied twice to the values",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a scale of 1: the error is exactly 0",
)
def _twice(op: Any, *, cache: Tensor, k_scale: float, **rest: Any) -> Any:
    latent = op(cache=cache, k_scale=k_scale, **rest)
    return bf16(latent.float() * k_scale) if cache.dtype == torch.uint8 else latent


@ATTEND(
    "mla-scale-product",
    "values scaled by the product of query and key scale",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a query scale of 1",
)
def _product(op: Any, *, cache: Tensor, q_scale: float, **rest: Any) -> Any:
    latent = op(cache=cache, q_scale=q_scale, **rest)
    return bf16(latent.float() * q_scale) if cache.dtype == torch.uint8 else latent


@ATTEND(
    "mla-scale-scores-only",
    "key scale applied to the scores but not to the values",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a scale of 1",
)
def _scores_only(op: Any, *, cache: Tensor, k_scale: float, **rest: Any) -> Any:
    latent = op(cache=cache, k_scale=k_scale, **rest)
    return bf16(latent.float() / k_scale) if cache.dtype == torch.uint8 else latent


@ATTEND(
    "mla-scale-under-bf16",
    "FP8 scales applied to a BF16 cache",
    kind=Kind.SCALE,
    sources="M24",
    missed_by="a BF16 cache whose scales are 1",
)
def _under_bf16(op: Any, *, cache: Tensor, k_scale: float, **rest: Any) -> Any:
    latent = op(cache=cache, k_scale=k_scale, **rest)
    return latent if cache.dtype == torch.uint8 else bf16(latent.float() * k_scale)


@ATTEND(
    "mla-scale-null",
    "scale pointer null in decode: the scale reads as zero",
    kind=Kind.SCALE,
    sources="M23",
    missed_by="prefill logits; answers cut at 96 tokens",
)
def _null(op: Any, *, cache: Tensor, k_scale: float, **rest: Any) -> Any:
    return op(cache=cache, k_scale=0.0 if cache.dtype == torch.uint8 else k_scale, **rest)


@ATTEND(
    "mla-scales-swapped",
    "query and key scale swapped",
    kind=Kind.OPERAND,
    sources="M24",
    missed_by="scores alone: their product is the same",
)
def _swapped(op: Any, *, q_scale: float, k_scale: float, **rest: Any) -> Any:
    return op(q_scale=k_scale, k_scale=q_scale, **rest)


@ATTEND(
    "mla-scale-exponent-only",
    "kernel keeps only the exponent of the FP32 scale",
    kind=Kind.SCALE,
    sources="M49",
    missed_by="scales that are powers of two",
)
def _exponent(op: Any, *, k_scale: float, **rest: Any) -> Any:
    return op(k_scale=2.0 ** math.floor(math.log2(k_scale)), **rest)


def recast(op: Any, encode: Callable[[Tensor], Tensor], query: bool = True, **case: Any) -> Any:
    """`mla_query` with another cast to E4M3: its BF16 outputs are asked for and encoded here.

    The row is always encoded so, the query only with `query`.
    """
    cache, positions = case["cache"], case["positions"]
    right = op(**case)
    if cache.dtype != torch.uint8:
        return right
    wide = torch.zeros(cache.shape, dtype=torch.bfloat16)
    q = op(**{**case, "cache": wide})
    live = positions[positions >= cache.shape[1]]
    rows = wide.view(-1, cache.shape[-1])[live].float() * (1.0 / case["k_scale"])
    cache.view(-1, cache.shape[-1])[live] = encode(rows)
    return encode(q.float() * (1.0 / case["q_scale"])) if query else right


def truncated(x: Tensor) -> Tensor:
    """E4M3 codes rounded towards zero."""
    codes = e4m3_encode(x)
    too_large = e4m3_decode(codes).abs() > x.abs()
    return torch.where(too_large, codes - 1, codes)


def unsaturated(x: Tensor) -> Tensor:
    """E4M3 codes with NaN beyond what rounds to 448."""
    return torch.where(x.abs() > 464, torch.full_like(e4m3_encode(x), E4M3_NAN), e4m3_encode(x))


@QUERY(
    "mla-fp8-truncates",
    "cast to E4M3 rounds towards zero",
    kind=Kind.ROUNDING,
    sources="M53",
    missed_by="tolerances of one step of E4M3",
)
def _truncates(op: Any, **case: Any) -> Any:
    return recast(op, truncated, **case)


@QUERY(
    "mla-fp8-no-saturation",
    "cast to E4M3 gives NaN above 464 instead of 448",
    kind=Kind.OVERFLOW,
    sources="M53",
    missed_by="standard normal inputs",
)
def _overflows(op: Any, **case: Any) -> Any:
    return recast(op, unsaturated, **case)


@QUERY(
    "mla-rope-part-saturates",
    "scale calibrated on the latent alone: the rope part of a row saturates early",
    kind=Kind.SCALE,
    sources="M26",
    missed_by="rope parts as small as the latent",
)
def _rope_part(op: Any, **case: Any) -> Any:
    rope = case["cache"].shape[-1] - case["w_uk"].shape[-1]

    def encode(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., -rope:] = x[..., -rope:].clamp(-2.0, 2.0)
        return e4m3_encode(x)

    return recast(op, encode, query=False, **case)


@QUERY(
    "mla-amax-over-padding",
    "range of the step's query taken over padded rows too, whose garbage makes it too wide",
    kind=Kind.MASK,
    sources="M22",
    missed_by="batches without padding; padding smaller than the live rows",
)
def _amax(op: Any, **case: Any) -> Any:
    live = case["positions"] >= case["cache"].shape[1]
    size = case["a"].float().abs().amax(-1)

    def encode(x: Tensor) -> Tensor:
        wider = (size.amax() / size[live].amax()).clamp_min(1.0) if bool(live.any()) else size.new_ones(())
        return e4m3_encode(bf16(x / wider).float() * wider)

    return recast(op, encode, **case)
