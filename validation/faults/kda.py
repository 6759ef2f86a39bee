"""Faults of Kimi delta attention: the recurrence on one token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer, part_of

LAYER = Layer("KDA recurrence")

DELTA = partial(LAYER.part, "kda_step", "delta")
"""The recurrence `delta(S, q, k, v, decay, beta) -> (S, o)`."""


def rounded(x: Tensor) -> Tensor:
    """f32 values that BF16 holds."""
    return bf16(x).float()


@DELTA(
    "kda-delta-dropped",
    "correction term k.S dropped from the delta rule",
    kind=Kind.DROPPED,
    sources="vacuous kernel tests",
    missed_by="iid keys with elementwise tolerances: random keys are nearly orthogonal",
)
def _dropped(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    S = S * decay[..., None, :] + (v * beta[..., None])[..., None] * k[..., None, :]
    return S, (S * q[..., None, :]).sum(-1)


@DELTA(
    "kda-beta-bf16",
    "beta rounded to BF16 before the FP32 update",
    kind=Kind.ROUNDING,
    sources="M04",
    missed_by="tolerance 5e-3; GSM8K (0.2 % at every length, it does not accumulate)",
)
def _beta(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, v, decay, rounded(beta))


@DELTA(
    "kda-state-bf16",
    "state rounded to BF16 at every step",
    kind=Kind.ROUNDING,
    sources="M124",
    missed_by="random keys (drift 4 times smaller), GSM8K",
)
def _state(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    S, o = right(S, q, k, v, decay, beta)
    return rounded(S), o


@DELTA(
    "kda-query-bf16",
    "normalised query rounded to BF16",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="elementwise tolerances",
)
def _query(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, rounded(q), k, v, decay, beta)


@DELTA(
    "kda-key-bf16",
    "normalised key rounded to BF16",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="elementwise tolerances",
)
def _key(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, rounded(k), v, decay, beta)


@DELTA(
    "kda-value-bf16",
    "value rounded to BF16 after the convolution",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="everything that takes the generic path, which rounds here too, for its reference",
)
def _value(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, rounded(v), decay, beta)


@DELTA(
    "kda-decay-bf16",
    "decay factor rounded to BF16",
    kind=Kind.ROUNDING,
    sources="kind of M04",
    missed_by="fast decay: near 1 BF16 has steps of 0.4 %, which compound",
)
def _decay(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, v, rounded(decay), beta)


@DELTA(
    "kda-decay-after-update",
    "state decayed after the update instead of before",
    kind=Kind.OPERAND,
    sources="kind of M01",
    missed_by="decay near 1",
)
def _late(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    S, _ = right(S, q, k, v, torch.ones_like(decay), beta)
    S = S * decay[..., None, :]
    return S, (S * q[..., None, :]).sum(-1)


@DELTA(
    "kda-decay-axis",
    "decay applied along the value axis of the state",
    kind=Kind.LAYOUT,
    sources="M01",
    missed_by="shape checks (both axes are 128), an empty state",
)
def _axis(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S * decay[..., :, None], q, k, v, torch.ones_like(decay), beta)


@DELTA(
    "kda-readout-stale",
    "output read from the state before the update",
    kind=Kind.STALE,
    sources="kind of M73",
    missed_by="slow updates; cosine of outputs",
)
def _stale(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    new, _ = right(S, q, k, v, decay, beta)
    return new, (S * decay[..., None, :] * q[..., None, :]).sum(-1)


@DELTA(
    "kda-beta-not-on-correction",
    "beta scales the value but not the correction",
    kind=Kind.DROPPED,
    sources="vacuous kernel tests",
    missed_by="iid keys, beta near 1",
)
def _half(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, v * beta[..., None], decay, torch.ones_like(beta))


@DELTA(
    "kda-decay-base2",
    "log-decay exponentiated to base 2",
    kind=Kind.CONSTANT,
    sources="kind of M29",
    missed_by="decay near 1",
)
def _base(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, v, decay**0.6931472, beta)


@DELTA(
    "kda-gate-unbounded",
    "gate in its unbounded form: -softplus instead of lower_bound * sigmoid",
    kind=Kind.CONSTANT,
    sources="M07",
    missed_by="gates in the linear region",
)
def _unbounded(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    share = (decay.double().log() / -5.0).clamp(1e-12, 1 - 1e-12)
    return right(S, q, k, v, torch.exp(-torch.nn.functional.softplus(share.logit())).float(), beta)


@DELTA(
    "kda-gate-head-group",
    "decay of a head pair's first head used for both",
    kind=Kind.LAYOUT,
    sources="M06",
    missed_by="one head, or equal head counts of keys and values",
)
def _group(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q, k, v, decay[:, torch.arange(decay.shape[1]) // 2 * 2], beta)


@DELTA(
    "kda-query-unscaled",
    "query not multiplied by d^-0.5",
    kind=Kind.SCALE,
    sources="kind of M28",
    missed_by="the gated norm behind it: a common factor of o cancels up to its epsilon",
)
def _unscaled(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    return right(S, q * q.shape[-1] ** 0.5, k, v, decay, beta)


@DELTA(
    "kda-state-slow-channel",
    "the last key channel is never decayed",
    kind=Kind.INDEX,
    sources="M05",
    missed_by="cosine: one of 128 channels",
)
def _channel(right: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
    kept = decay.clone()
    kept[..., -1] = 1.0
    return right(S, q, k, v, kept, beta)


for _size in (4, 32):

    @LAYER.made_of(
        "kda_step",
        f"kda-beta-scaled-at-{_size}",
        f"beta two per cent too small in the kernel of bin {_size} alone",
        kind=Kind.ONE_BIN,
        sources="M59",
        missed_by="one batch size",
    )
    def _one_bin(ops: Ops, size: int = _size) -> Any:
        step = ops["kda_step"]
        inner = part_of(step, "delta")

        def delta(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Any:
            return inner(S, q, k, v, decay, beta * 0.98)

        return lambda **case: step(**case, **({"delta": delta} if case["slots"].shape[0] == size else {}))
