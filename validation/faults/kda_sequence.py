"""Faults of Kimi delta attention over many tokens: chunks, their inverse, and the hand-off to decode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults import kernels
from validation.faults.base import GENERIC, Kind, Ops
from validation.faults.layer import Layer

LAYER = Layer("KDA prefill", paths=(GENERIC,))

SEQUENCE = partial(LAYER.op, "kda_sequence")


def exact(A: Tensor, b: Tensor) -> Tensor:
    """x of (I + A) x = b by forward substitution."""
    solved: Tensor = torch.linalg.solve_triangular(A, b, upper=False, unitriangular=True)
    return solved


def _newest(totals: list[Tensor]) -> Tensor:
    return totals[-1]


def by_powers(A: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by (I - A)(I + A^2)(I + A^4)(I + A^8), every power rounded to `dtype`."""
    eye, power = torch.eye(A.shape[-1]), -A
    inverse = eye + power
    for _ in range(3):
        power = (power @ power).to(dtype).float()
        inverse = (inverse @ (eye + power)).to(dtype).float()
    return inverse @ b


@SEQUENCE(
    "kda-state-transposed",
    "state transposed between prefill and decode",
    kind=Kind.LAYOUT,
    sources="M01",
    missed_by="shape checks (both axes are 128), outputs of the first chunk, batch-1 smoke tests",
)
def _transposed(op: Any, *, state: Tensor, slot: int, **rest: Any) -> Any:
    y = op(state=state, slot=slot, **rest)
    state[slot] = state[slot].transpose(-1, -2).clone()
    return y


@LAYER.made_of(
    "kda_sequence",
    "kda-neumann-fp16",
    "the 16 x 16 inverse taken by FP16 power products",
    kind=Kind.ROUNDING,
    sources="M02",
    missed_by="iid keys: 2,500 times smaller than with equal ones",
)
def _fp16(ops: Ops) -> Any:
    solve = partial(by_powers, dtype=torch.float16)
    return lambda **case: kernels.kda_sequence(case, solve=solve, last_decay=_newest)


@LAYER.made_of(
    "kda_sequence",
    "kda-neumann-bf16",
    "explicit powers of the inverse kept in BF16: they cancel at trained decay",
    kind=Kind.ROUNDING,
    sources="M03",
    missed_by="random gates",
)
def _powers(ops: Ops) -> Any:
    solve = partial(by_powers, dtype=torch.bfloat16)
    return lambda **case: kernels.kda_sequence(case, solve=solve, last_decay=_newest)


@LAYER.made_of(
    "kda_sequence",
    "kda-scratch-aliased",
    "the scratch tile of a chunk's total decay still holds the chunk before",
    kind=Kind.STALE,
    sources="M03",
    missed_by="prompts of one chunk",
)
def _aliased(ops: Ops) -> Any:
    return lambda **case: kernels.kda_sequence(
        case, solve=exact, last_decay=lambda totals: totals[max(0, len(totals) - 2)]
    )


@SEQUENCE(
    "kda-chunk-from-zeros",
    "every chunk of prefill starts from an empty state",
    kind=Kind.STALE,
    sources="M72",
    missed_by="prompts of one chunk",
)
def _zeros(op: Any, *, state: Tensor, slot: int, **rest: Any) -> Any:
    state[slot] = 0
    return op(state=state, slot=slot, **rest)


@SEQUENCE(
    "kda-chunk-boundary-token",
    "the convolution repeats a token where a chunk continues another",
    kind=Kind.INDEX,
    sources="M32",
    missed_by="the first chunk, which is bit-identical",
)
def _boundary(op: Any, *, conv_state: Tensor, slot: int, **rest: Any) -> Any:
    conv_state[slot, :, :2] = conv_state[slot, :, 1:].clone()
    return op(conv_state=conv_state, slot=slot, **rest)


@SEQUENCE(
    "kda-chunk-padding-real",
    "a chunk's padding to 16 tokens is processed as tokens",
    kind=Kind.MASK,
    sources="M83",
    missed_by="lengths that are multiples of 16",
)
def _padding(op: Any, *, proj: Tensor, **rest: Any) -> Any:
    return op(proj=torch.nn.functional.pad(proj, (0, 0, 0, -proj.shape[0] % 16)), **rest)[: proj.shape[0]]


@SEQUENCE(
    "kda-last-token-dropped",
    "the last token of a prompt does not reach the state",
    kind=Kind.INDEX,
    sources="kind of M67",
    missed_by="outputs of the prompt",
)
def _last(op: Any, *, proj: Tensor, state: Tensor, conv_state: Tensor, **rest: Any) -> Any:
    full = {"state": state.clone(), "conv_state": conv_state.clone()}
    y = op(proj=proj, **full, **rest)
    if proj.shape[0] > 1:
        op(proj=proj[:-1], state=state, conv_state=conv_state, **rest)
    return y


@SEQUENCE(
    "kda-neighbour-slot-cleared",
    "prefill clears the slot after its own",
    kind=Kind.OWNERSHIP,
    sources="M88",
    missed_by="one request at a time",
)
def _neighbour(op: Any, *, state: Tensor, slot: int, **rest: Any) -> Any:
    y = op(state=state, slot=slot, **rest)
    if slot + 1 < state.shape[0]:
        state[slot + 1] = 0
    return y
