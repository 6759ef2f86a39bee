"""Faults of multi-head latent attention around the attention itself: query, latent norms, value and gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind
from validation.faults.layer import Layer
from validation.faults.memory import as_if_side_by_side

LAYER = Layer("MLA projections")

QUERY = partial(LAYER.op, "mla_query")
VALUE = partial(LAYER.op, "mla_value")


@QUERY(
    "mla-rope-applied",
    "rotary embedding applied in a model without",
    kind=Kind.OPERAND,
    sources="M28",
    missed_by="position 0; models with rotary embedding",
)
def _rope(op: Any, *, a: Tensor, w_uk: Tensor, cache: Tensor, positions: Tensor, **rest: Any) -> Any:
    half = (cache.shape[-1] - w_uk.shape[-1]) // 2
    angle = positions[:, None].float() * 10000.0 ** (-torch.arange(half) / half)
    x, y = a[:, -2 * half : -half].float(), a[:, -half:].float()
    turned = [x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()]
    a = torch.cat([a[:, : -2 * half], *(bf16(part) for part in turned)], 1)
    return op(a=a, w_uk=w_uk, cache=cache, positions=positions, **rest)


@QUERY(
    "mla-norm-eps",
    "epsilon of the latent's norms 1e-3",
    kind=Kind.CONSTANT,
    sources="M82",
    missed_by="latents of ordinary size",
)
def _eps(op: Any, *, eps: float, **rest: Any) -> Any:
    return op(eps=1e-3, **rest)


@QUERY(
    "mla-kv-norm-weight-dropped",
    "weight of the latent's norm left out",
    kind=Kind.DROPPED,
    sources="M82",
    missed_by="weights of one in the test",
)
def _weight(op: Any, *, kv_norm_weight: Tensor, **rest: Any) -> Any:
    return op(kv_norm_weight=torch.ones_like(kv_norm_weight), **rest)


@VALUE(
    "mla-gate-dropped",
    "output gate left out",
    kind=Kind.DROPPED,
    sources="kind of M51",
    missed_by="saturated gates",
)
def _gate(op: Any, *, gate: Tensor, **rest: Any) -> Any:
    return op(gate=torch.full_like(gate, 40.0), **rest)


@VALUE(
    "mla-gate-bf16",
    "sigmoid of the output gate rounded to BF16",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="elementwise tolerances: one rounding more",
)
def _gate_bf16(op: Any, *, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Any:
    value = bf16(torch.einsum("nhc,hcv->nhv", latent.float(), w_uv.float())).flatten(1)
    return bf16(value.float() * bf16(torch.sigmoid(gate.float())).float())


@VALUE(
    "mla-value-heads-swapped",
    "value heads expanded with the next head's matrix",
    kind=Kind.INDEX,
    sources="M06",
    missed_by="one head a rank",
)
def _heads(op: Any, *, w_uv: Tensor, **rest: Any) -> Any:
    return op(w_uv=w_uv.roll(1, 0), **rest)


@VALUE(
    "mla-value-unrounded",
    "value not rounded to BF16 before the gate",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="every measure of error: one rounding fewer is closer to the exact result, but off the contract",
)
def _unrounded(op: Any, *, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Any:
    value = torch.einsum("nhc,hcv->nhv", latent.float(), w_uv.float()).flatten(1)
    return bf16(value * torch.sigmoid(gate.float()))


@VALUE(
    "mla-value-rows-side-by-side",
    "stride of a row of the latent taken for its heads'",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="heads of one rank; gaps between heads alone",
)
def _side_by_side(op: Any, *, latent: Tensor, **rest: Any) -> Any:
    return op(latent=as_if_side_by_side(latent), **rest)


@VALUE(
    "mla-value-gate-nan-hidden",
    "a gate that is NaN is shut",
    kind=Kind.MASK,
    sources="kind of M22",
    missed_by="rows that are all NaN",
)
def _shut(op: Any, *, gate: Tensor, **rest: Any) -> Any:
    return op(gate=torch.where(gate.isnan(), -30.0, gate), **rest)
