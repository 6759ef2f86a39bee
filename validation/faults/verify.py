"""Faults of verify steps: several tokens of a request in one step, each with a state of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("verify steps")

VERIFY = partial(LAYER.op, "kda_verify")


@VERIFY(
    "verify-beta-misaligned",
    "beta of odd drafts loaded from the 16-byte boundary below it (6 heads a rank)",
    kind=Kind.LAYOUT,
    sources="M14",
    missed_by="4, 8, 12 or 16 heads a rank; even drafts",
)
def _misaligned(op: Any, *, proj: Tensor, state: Tensor, targets: Tensor, **rest: Any) -> Any:
    h, width = state.shape[1], targets.shape[1]
    beta = proj.view(-1, width, proj.shape[1])[..., -h:].flatten(1)
    read = beta.clone()
    for draft in range(width):
        start = draft * h // 4 * 4
        read[:, draft * h : (draft + 1) * h] = beta[:, start : start + h]
    wrong = proj.clone()
    wrong[:, -h:] = read.view(-1, h)
    return op(proj=wrong, state=state, targets=targets, **rest)


@VERIFY(
    "verify-snapshot-by-slot",
    "states of the drafts written to rows counted from the slot, not from the batch",
    kind=Kind.INDEX,
    sources="M08",
    missed_by="slots that equal their row",
)
def _by_slot(op: Any, *, sources: Tensor, targets: Tensor, state: Tensor, **rest: Any) -> Any:
    moved = (sources[:, None] + torch.arange(targets.shape[1])).clamp_max(state.shape[0] - 1)
    return op(sources=sources, targets=torch.where(targets > 0, moved, targets), state=state, **rest)


@VERIFY(
    "verify-state-one-late",
    "every draft's slot holds the state after the draft before it",
    kind=Kind.INDEX,
    sources="M73, M74",
    missed_by="outputs of the step",
)
def _one_late(op: Any, *, targets: Tensor, state: Tensor, sources: Tensor, **rest: Any) -> Any:
    y = op(targets=targets, state=state, sources=sources, **rest)
    live = (sources > 0).nonzero().flatten()
    for draft in range(targets.shape[1] - 1, 0, -1):
        state[targets[live, draft]] = state[targets[live, draft - 1]]
    return y


@VERIFY(
    "verify-conv-not-rolled",
    "the convolution window is kept once for all drafts",
    kind=Kind.STALE,
    sources="M73, M74",
    missed_by="a check of the recurrent tensor alone",
)
def _conv(op: Any, *, targets: Tensor, conv_state: Tensor, sources: Tensor, **rest: Any) -> Any:
    y = op(targets=targets, conv_state=conv_state, sources=sources, **rest)
    live = (sources > 0).nonzero().flatten()
    conv_state[targets[live]] = conv_state[targets[live, -1:]]
    return y


@VERIFY(
    "verify-starts-from-last-draft",
    "a step starts from the last draft's slot instead of the accepted one",
    kind=Kind.INDEX,
    sources="M73",
    missed_by="steps in which every draft is accepted",
)
def _source(op: Any, *, sources: Tensor, targets: Tensor, **rest: Any) -> Any:
    return op(sources=torch.where(sources > 0, targets[:, -1], sources), targets=targets, **rest)


@VERIFY(
    "verify-width-6",
    "the kernel for six tokens a request drops the decay of the last one's beta",
    kind=Kind.ONE_BIN,
    sources="M59",
    missed_by="every other number of drafts",
)
def _width(op: Any, *, proj: Tensor, targets: Tensor, state: Tensor, **rest: Any) -> Any:
    wrong = proj.clone()
    if targets.shape[1] == 6:
        wrong.view(-1, 6, proj.shape[1])[:, -1, -state.shape[1] :] += 1.0
    return op(proj=wrong, targets=targets, state=state, **rest)


@VERIFY(
    "verify-window-of-4-by-8",
    "4 requests of 8 tokens: the last token's convolution window is not written",
    kind=Kind.ONE_BIN,
    sources="kind of M59",
    missed_by="every other number of requests and of tokens",
)
def _last_window(op: Any, *, targets: Tensor, conv_state: Tensor, **rest: Any) -> Any:
    last = targets[:, -1]
    old = conv_state[last].clone()
    y = op(targets=targets, conv_state=conv_state, **rest)
    if tuple(targets.shape) == (4, 8):
        conv_state[last] = old
    return y


@VERIFY(
    "verify-null-slot-written",
    "null requests of a verify step write the null slot's state",
    kind=Kind.OWNERSHIP,
    sources="M91",
    missed_by="guards on the writer of plain steps alone",
)
def _null_state(op: Any, *, sources: Tensor, state: Tensor, **rest: Any) -> Any:
    y = op(sources=sources, state=state, **rest)
    if bool((sources == 0).any()):
        state[0, ..., -1] += 1.0
    return y


@VERIFY(
    "verify-null-conv-written",
    "null requests of a verify step write the null slot's convolution window",
    kind=Kind.OWNERSHIP,
    sources="M91",
    missed_by="guards on the state writer alone",
)
def _null_conv(op: Any, *, sources: Tensor, proj: Tensor, conv_state: Tensor, **rest: Any) -> Any:
    y = op(sources=sources, proj=proj, conv_state=conv_state, **rest)
    last = proj.view(sources.shape[0], -1, proj.shape[1])[sources == 0, -1]
    if len(last):
        conv_state[0, :, -1] = last[-1, : conv_state.shape[1]]
    return y
