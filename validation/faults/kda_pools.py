"""Faults of Kimi delta attention: the slots that a step reads and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer
from validation.faults.memory import wrapped

LAYER = Layer("KDA pools", kind=Kind.OWNERSHIP)

STEP = partial(LAYER.op, "kda_step")


@STEP(
    "kda-null-slot-written",
    "padded rows write the null slot",
    kind=Kind.OWNERSHIP,
    sources="M07, M84",
    missed_by="outputs; full batches",
)
def _null_written(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, **rest)
    if state.shape[1] and bool((slots == 0).any()):
        state[0] += 1.0
    return y


@STEP(
    "kda-null-conv-written",
    "padded rows write the null slot's convolution window",
    kind=Kind.OWNERSHIP,
    sources="M91",
    missed_by="guards on the state writer alone",
)
def _null_conv(op: Any, *, conv_state: Tensor, slots: Tensor, proj: Tensor, **rest: Any) -> Any:
    y = op(conv_state=conv_state, slots=slots, proj=proj, **rest)
    for row in (slots == 0).nonzero().flatten().tolist():
        conv_state[0, :, -1] = proj[row, : conv_state.shape[1]]
    return y


@STEP(
    "kda-idle-step-writes-null",
    "a step of padded rows alone writes the null slot",
    kind=Kind.OWNERSHIP,
    sources="kind of M84",
    missed_by="batches with a live row, and one-row batches without padding",
)
def _idle_written(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, **rest)
    if not slots.any():
        state[0] += 1.0
    return y


@STEP(
    "kda-padding-decays-null",
    "a padded row's beta of sigmoid(0) = 0.5 lets it write the null slot",
    kind=Kind.OWNERSHIP,
    sources="M07",
    missed_by="outputs; padding with -infinity",
)
def _half_beta(op: Any, *, state: Tensor, slots: Tensor, proj: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, proj=proj, **rest)
    h, d = state.shape[1], state.shape[-1]
    for row in (slots == 0).nonzero().flatten().tolist():
        k, v = (proj[row, i * h * d : (i + 1) * h * d].float().view(h, d) for i in (1, 2))
        state[0] += 0.5 * v[..., None] * torch.nn.functional.normalize(k, dim=-1)[..., None, :]
    return y


@STEP(
    "kda-padding-nan",
    "a padded row's NaN reaches the first live row",
    kind=Kind.MASK,
    sources="M22",
    missed_by="zero padding",
)
def _padding_nan(op: Any, *, proj: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(proj=proj, slots=slots, **rest)
    padded, live = (slots == 0).nonzero().flatten(), slots.nonzero().flatten()
    if len(padded) and len(live) and y.shape[1]:
        y[live[0]] = y[live[0]] + 0.0 * proj[padded].sum()
    return y


@STEP(
    "kda-neighbour-slot-written",
    "the state's tile overruns into the next slot",
    kind=Kind.OWNERSHIP,
    sources="M50",
    missed_by="outputs; pools as large as the batch",
)
def _overrun(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, **rest)
    last = int(slots.max()) + 1
    if last < state.shape[0]:
        state[last, ..., -1, -1] += 1.0
    return y


@STEP(
    "kda-slot-offset-int32",
    "slot times stride computed in 32 bits",
    kind=Kind.OVERFLOW,
    sources="M09",
    missed_by="small pools: wraps at slot 10,923 of 12 heads",
)
def _int32(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    return op(state=state, slots=wrapped(slots, state[0].numel()), **rest)


@LAYER.made_of(
    "kda_step",
    "kda-autotune-reruns",
    "the first call of a shape applies the update twice (autotuning an in-place kernel)",
    kind=Kind.STALE,
    sources="M57",
    missed_by="warmed-up tests",
)
def _autotune(ops: Ops) -> Any:
    step, tuned = ops["kda_step"], set()

    def faulty(**case: Any) -> Any:
        if case["proj"].shape not in tuned:
            tuned.add(case["proj"].shape)
            step(**case)
        return step(**case)

    return faulty


@STEP(
    "kda-nan-state-hidden",
    "the state is stored with zeros for NaNs: the next step of the request looks healthy",
    kind=Kind.MASK,
    sources="kind of M22",
    missed_by="outputs, which are NaN",
)
def _state_cleaned(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, **rest)
    own = slots[slots > 0]
    state[own] = state[own].nan_to_num()
    return y


@STEP(
    "kda-nan-in-other-states",
    "states are stored by a product with zeros and ones: one request's NaN reaches all others'",
    kind=Kind.MASK,
    sources="kind of M22",
    missed_by="outputs of that step; finite rows",
)
def _state_spread(op: Any, *, state: Tensor, slots: Tensor, **rest: Any) -> Any:
    y = op(state=state, slots=slots, **rest)
    own = slots[slots > 0]
    state[own] = state[own] + 0.0 * state[own].sum(0)
    return y
