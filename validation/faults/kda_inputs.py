"""Faults of Kimi delta attention: convolution, gates, norms, and the rows that a step reads and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults import kernels
from validation.faults.base import GENERIC, Kind, Ops
from validation.faults.layer import Layer, part_of

LAYER = Layer("KDA inputs and pools")

STEP = partial(LAYER.op, "kda_step")
SEQUENCE = partial(LAYER.op, "kda_sequence", paths=(GENERIC,))


@STEP(
    "kda-conv-shifted",
    "convolution window read one token off",
    kind=Kind.INDEX,
    sources="M32, M74",
    missed_by="final tokens: the window heals after three tokens, the state it fed stays wrong",
)
def _shifted(op: Any, *, conv_state: Tensor, slots: Tensor, **rest: Any) -> Any:
    owned = slots[slots > 0]
    conv_state[owned] = conv_state[owned].roll(1, dims=-1)
    return op(conv_state=conv_state, slots=slots, **rest)


@STEP(
    "kda-conv-not-written",
    "convolution window not written back",
    kind=Kind.STALE,
    sources="M74",
    missed_by="outputs of a single step",
)
def _not_written(op: Any, *, conv_state: Tensor, **rest: Any) -> Any:
    return op(conv_state=conv_state.clone(), **rest)


@STEP(
    "kda-conv-reversed",
    "convolution taps applied newest first",
    kind=Kind.LAYOUT,
    sources="kind of M01",
    missed_by="symmetric or random taps in the test alone",
)
def _reversed(op: Any, *, conv_weight: Tensor, **rest: Any) -> Any:
    return op(conv_weight=conv_weight.flip(-1), **rest)


@STEP(
    "kda-conv-oldest-dropped",
    "oldest tap of the convolution dropped",
    kind=Kind.DROPPED,
    sources="kind of M32",
    missed_by="trained taps are small there",
)
def _three_taps(op: Any, *, conv_weight: Tensor, **rest: Any) -> Any:
    weight = conv_weight.clone()
    weight[:, 0] = 0
    return op(conv_weight=weight, **rest)


@STEP(
    "kda-query-key-swapped",
    "query and key columns of the projection swapped",
    kind=Kind.OPERAND,
    sources="kind of M45",
    missed_by="self-consistent layouts: packer and kernel agree",
)
def _swapped(op: Any, *, proj: Tensor, state: Tensor, **rest: Any) -> Any:
    D = state.shape[1] * state.shape[-1]
    order = torch.cat([torch.arange(D, 2 * D), torch.arange(D), torch.arange(2 * D, proj.shape[1])])
    return op(proj=proj[:, order], state=state, **rest)


@STEP(
    "kda-dt-bias-dropped",
    "dt_bias left out of the decay gate",
    kind=Kind.DROPPED,
    sources="kind of M07",
    missed_by="gates around zero",
)
def _no_bias(op: Any, *, dt_bias: Tensor, **rest: Any) -> Any:
    return op(dt_bias=torch.zeros_like(dt_bias), **rest)


@STEP(
    "kda-a-log-dropped",
    "exp(A_log) left out of the decay gate",
    kind=Kind.DROPPED,
    sources="kind of M07",
    missed_by="A_log near zero",
)
def _no_rate(op: Any, *, A_log: Tensor, **rest: Any) -> Any:
    return op(A_log=torch.zeros_like(A_log), **rest)


@STEP(
    "kda-norm-weight-dropped",
    "weight of the gated norm left out",
    kind=Kind.DROPPED,
    sources="kind of M82",
    missed_by="weights of one in the test",
)
def _no_weight(op: Any, *, norm_weight: Tensor, **rest: Any) -> Any:
    return op(norm_weight=torch.ones_like(norm_weight), **rest)


@LAYER.made_of(
    "kda_step",
    "kda-l2-eps",
    "epsilon under the root of the key norm 1e-3 instead of 1e-6",
    kind=Kind.CONSTANT,
    sources="M82",
    missed_by="keys of ordinary size",
)
def _l2_eps(ops: Ops) -> Any:
    inner = part_of(ops["kda_step"], "delta")
    return lambda **case: kernels.kda_step(case, l2_eps=1e-3, inner=inner)


@LAYER.made_of(
    "kda_step",
    "kda-norm-eps",
    "epsilon of the output norm 1e-3 instead of 1e-5",
    kind=Kind.CONSTANT,
    sources="M82",
    missed_by="outputs of ordinary size",
)
def _norm_eps(ops: Ops) -> Any:
    inner = part_of(ops["kda_step"], "delta")
    return lambda **case: kernels.kda_step(case, norm_eps=1e-3, inner=inner)


@STEP(
    "kda-reads-next-row",
    "last lane of the decay input read from the next row",
    kind=Kind.MASK,
    sources="M05",
    missed_by="rows alike; all rows but the last of an allocation",
)
def _next_row(op: Any, *, proj: Tensor, state: Tensor, **rest: Any) -> Any:
    h, d = state.shape[1], state.shape[-1]
    wrong = proj.clone()
    wrong[:, 4 * h * d + d - 1] = proj[:, 4 * h * d].roll(-1, 0)
    return op(proj=wrong, state=state, **rest)


@STEP(
    "kda-dense-strides",
    "row stride of the KDA projection taken for its width",
    kind=Kind.LAYOUT,
    sources="M15",
    missed_by="contiguous tests",
)
def _dense(op: Any, *, proj: Tensor, **rest: Any) -> Any:
    return op(proj=as_if_dense(proj), **rest)


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


def as_if_dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes the row stride of a 2-D `x` for its width."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def wrapped(index: Tensor, stride: int) -> Tensor:
    """The index that `index * stride` leads to when it is computed in 32 bits (two's complement, then 2^32 later)."""
    offset = (index * stride + 2**31) % 2**32 - 2**31
    return torch.div(offset, stride, rounding_mode="floor") % (2**31 // stride + 1)
