"""Faults of Kimi delta attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Fault, Ops


def _transpose_after_prefill(ops: Ops) -> Ops:
    sequence: Any = ops["kda_sequence"]

    def faulty(*, state: Tensor, slot: int, **rest: Any) -> Any:
        y = sequence(state=state, slot=slot, **rest)
        state[slot] = state[slot].transpose(-1, -2).clone()
        return y

    return {"kda_sequence": faulty}


def _without_correction(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    S = S * decay[..., None, :]
    S = S + (v * beta[..., None])[..., None] * k[..., None, :]
    return S, (S * q[..., None, :]).sum(-1)


def _rounded_state(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, inner: Any) -> Any:
    S, o = inner(S, q, k, v, decay, beta)
    return S.bfloat16().float(), o


def _shift_window(ops: Ops) -> Ops:
    step: Any = ops["kda_step"]

    def faulty(*, conv_state: Tensor, slots: Tensor, **rest: Any) -> Any:
        owned = slots[slots > 0]
        conv_state[owned] = conv_state[owned].roll(1, dims=-1)
        return step(conv_state=conv_state, slots=slots, **rest)

    return {"kda_step": faulty}


def _round_state(ops: Ops) -> Ops:
    step: Any = ops["kda_step"]
    return {"kda_step": partial(step, delta=partial(_rounded_state, inner=_keyword_default(step, "delta")))}


def _write_null_slot(ops: Ops) -> Ops:
    step: Any = ops["kda_step"]

    def faulty(*, state: Tensor, slots: Tensor, **rest: Any) -> Any:
        y = step(state=state, slots=slots, **rest)
        if state.shape[1] and bool((slots == 0).any()):
            state[0] += 1.0
        return y

    return {"kda_step": faulty}


def _round_beta(ops: Ops) -> Ops:
    step: Any = ops["kda_step"]
    inner = _keyword_default(step, "delta")

    def delta(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
        return inner(S, q, k, v, decay, beta.to(torch.bfloat16).float())

    return {"kda_step": partial(step, delta=delta)}


def _keyword_default(function: Any, name: str) -> Any:
    """The value that a keyword-only part of an op has now, whether by default or by an earlier fault."""
    if isinstance(function, partial) and name in function.keywords:
        return function.keywords[name]
    inner: Any = function.func if isinstance(function, partial) else function
    return inner.__kwdefaults__[name]


FAULTS = (
    Fault(
        "kda-state-transposed",
        "state transposed between prefill and decode",
        "kda_sequence",
        ("M01",),
        ("generic",),
        _transpose_after_prefill,
    ),
    Fault(
        "kda-delta-dropped",
        "correction term k.S dropped from the delta rule",
        "kda_step",
        ("practice 7",),
        ("specialized",),
        lambda ops: {"kda_step": partial(ops["kda_step"], delta=_without_correction)},
    ),
    Fault(
        "kda-state-bf16",
        "state rounded to BF16 at every step",
        "kda_step",
        ("M124",),
        ("specialized",),
        _round_state,
    ),
    Fault(
        "kda-beta-bf16",
        "beta rounded to BF16 before the FP32 update",
        "kda_step",
        ("M04",),
        ("specialized",),
        _round_beta,
    ),
    Fault(
        "kda-conv-shifted",
        "convolution window read one token off",
        "kda_step",
        ("M32", "M74"),
        ("specialized",),
        _shift_window,
    ),
    Fault(
        "kda-null-slot-written",
        "padded rows write the null slot",
        "kda_step",
        ("M07", "M84"),
        ("specialized",),
        _write_null_slot,
    ),
)
