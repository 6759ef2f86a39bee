"""Faults of Kimi delta attention: convolution, gates, norms and projected rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults import kernels
from validation.faults.base import GENERIC, Kind, Ops
from validation.faults.layer import Layer, part_of
from validation.faults.memory import as_if_dense, as_if_first

LAYER = Layer("KDA inputs")

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
    "lanes beyond the decay's width read the next row and feed exp, then are multiplied by zero",
    kind=Kind.MASK,
    sources="M05",
    missed_by="next rows whose exp is finite, so all but garbage behind the last row",
)
def _next_row(op: Any, *, proj: Tensor, **rest: Any) -> Any:
    y = op(proj=proj, **rest)
    lanes = proj[:, :8].roll(-1, 0).float().exp().sum(-1, keepdim=True)
    return (y.float() + 0.0 * lanes).to(y.dtype)


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
    "kda-storage-offset",
    "the KDA projection read from the start of its storage",
    kind=Kind.LAYOUT,
    sources="kind of M15",
    missed_by="inputs that no view gives",
)
def _offset(op: Any, *, proj: Tensor, **rest: Any) -> Any:
    return op(proj=as_if_first(proj), **rest)
