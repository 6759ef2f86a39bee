"""Faults of the experts: MXFP4 weights and scales, SiTU, grouping, sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from numerics.formats import bf16
from validation.faults.base import Kind, Ops
from validation.faults.layer import Layer

LAYER = Layer("experts and MXFP4")

EXPERTS = partial(LAYER.op, "experts")
SHARED = partial(LAYER.op, "shared_expert")


def rescaled(weight: Any, scale: Tensor) -> Any:
    """The MXFP4 weight with other scales."""
    return type(weight)(weight.packed, scale)


@EXPERTS(
    "moe-silu",
    "experts' SiTU replaced by an unsaturated gate",
    kind=Kind.CONSTANT,
    sources="M51",
    missed_by="small activations, where SiLU and SiTU agree",
)
def _silu(op: Any, *, beta: float, linear_beta: float, **rest: Any) -> Any:
    return op(beta=1e4, linear_beta=1e4, **rest)


@SHARED(
    "moe-shared-silu",
    "shared expert's SiTU replaced by an unsaturated gate",
    kind=Kind.CONSTANT,
    sources="M51",
    missed_by="small activations",
)
def _shared_silu(op: Any, *, beta: float, linear_beta: float, **rest: Any) -> Any:
    return op(beta=1e4, linear_beta=1e4, **rest)


@EXPERTS(
    "moe-situ-beta",
    "SiTU saturates at 4.01 instead of 4",
    kind=Kind.CONSTANT,
    sources="M51",
    missed_by="small activations; tolerances of a per cent",
)
def _beta(op: Any, *, beta: float, **rest: Any) -> Any:
    return op(beta=beta * 1.0025, **rest)


@SHARED(
    "moe-shared-situ-beta",
    "shared expert's SiTU saturates at 4.01 instead of 4",
    kind=Kind.CONSTANT,
    sources="M51",
    missed_by="small activations; tolerances of a per cent",
)
def _shared_beta(op: Any, *, beta: float, **rest: Any) -> Any:
    return op(beta=beta * 1.0025, **rest)


@EXPERTS(
    "moe-gate-up-swapped",
    "gate and up rows of the experts swapped",
    kind=Kind.OPERAND,
    sources="kind of M138",
    missed_by="a packer that swaps them too",
)
def _swapped(op: Any, *, w13: Any, **rest: Any) -> Any:
    half = w13.packed.shape[1] // 2
    return op(w13=type(w13)(w13.packed.roll(half, 1), w13.scale.roll(half, 1)), **rest)


@EXPERTS(
    "moe-nibbles-swapped",
    "high nibble taken first",
    kind=Kind.LAYOUT,
    sources="kind of M45",
    missed_by="shape checks",
)
def _nibbles(op: Any, *, w13: Any, **rest: Any) -> Any:
    swapped = (w13.packed >> 4) | (w13.packed << 4)
    return op(w13=type(w13)(swapped, w13.scale), **rest)


@EXPERTS(
    "moe-scales-not-interleaved",
    "scale rows shuffled without the interleave that the kernel undoes",
    kind=Kind.LAYOUT,
    sources="M45",
    missed_by="random weights, which share exponents; an oracle with the same layout",
)
def _interleave(op: Any, *, w13: Any, **rest: Any) -> Any:
    E, N, K = w13.scale.shape
    rows = 4 if N % 4 == 0 else 1
    return op(w13=rescaled(w13, w13.scale.view(E, rows, N // rows, K).transpose(1, 2).reshape(E, N, K)), **rest)


@EXPERTS(
    "moe-scale-expert-stride",
    "scales of expert e read at e times the unpadded stride",
    kind=Kind.LAYOUT,
    sources="M46",
    missed_by="expert 0",
)
def _stride(op: Any, *, w2: Any, **rest: Any) -> Any:
    E, size = w2.scale.shape[0], w2.scale[0].numel()
    starts = (torch.arange(E) * (size - 1)).clamp_min(0)
    read = w2.scale.flatten()[starts[:, None] + torch.arange(size)].view_as(w2.scale)
    return op(w2=rescaled(w2, read), **rest)


@EXPERTS(
    "moe-scale-pad-unmasked",
    "scale bytes that pad the last tile are not masked (0xFF is NaN)",
    kind=Kind.MASK,
    sources="M47",
    missed_by="zero padding; widths that fill a tile",
)
def _pad(op: Any, *, w13: Any, **rest: Any) -> Any:
    scale = w13.scale.clone()
    if scale.shape[-1] % 4:
        scale[..., -1] = 0xFF
    return op(w13=rescaled(w13, scale), **rest)


@EXPERTS(
    "moe-scale-off-by-one",
    "block scale one power of two too large in one block",
    kind=Kind.INDEX,
    sources="kind of M45",
    missed_by="cosine",
)
def _one_block(op: Any, *, w2: Any, **rest: Any) -> Any:
    scale = w2.scale.clone()
    scale[..., -1] += 1
    return op(w2=rescaled(w2, scale), **rest)


@EXPERTS(
    "moe-tile-overrun",
    "the last row of an expert's group gets the next expert's result",
    kind=Kind.OWNERSHIP,
    sources="M50",
    missed_by="groups of 64 rows and more",
)
def _tile(op: Any, *, ids: Tensor, w2: Any, **rest: Any) -> Any:
    wrong = ids.clone()
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero()[-1].tolist()
        wrong[row, slot] = (expert + 1) % w2.packed.shape[0]
    return op(ids=wrong, w2=w2, **rest)


@EXPERTS(
    "moe-expert-off-by-one",
    "the last expert's weights are the one's before",
    kind=Kind.INDEX,
    sources="kind of M46",
    missed_by="tokens that choose other experts",
)
def _last(op: Any, *, ids: Tensor, w2: Any, **rest: Any) -> Any:
    last = w2.packed.shape[0] - 1
    return op(ids=torch.where(ids == last, last - 1, ids), w2=w2, **rest)


@LAYER.made_of(
    "experts",
    "moe-slots-summed-bf16",
    "slots summed in BF16",
    kind=Kind.REDUCTION,
    sources="kind of M34",
    missed_by="tolerances of a per cent",
)
def _slots(ops: Ops) -> Any:
    experts = ops["experts"]

    def faulty(*, weights: Tensor, **rest: Any) -> Tensor:
        total = torch.zeros(())
        for slot in range(weights.shape[1]):
            alone = torch.zeros_like(weights)
            alone[:, slot] = weights[:, slot]
            total = bf16(total + experts(weights=alone, **rest).float()).float()
        return bf16(total)

    return faulty


@EXPERTS(
    "moe-last-slot-dropped",
    "the last chosen expert is left out",
    kind=Kind.INDEX,
    sources="kind of M40",
    missed_by="cosine: its weight is the smallest",
)
def _dropped(op: Any, *, weights: Tensor, **rest: Any) -> Any:
    kept = weights.clone()
    kept[:, -1] = 0
    return op(weights=kept, **rest)


@EXPERTS(
    "moe-expert-order-sum",
    "slots added in ascending expert order instead of slot order",
    kind=Kind.REDUCTION,
    sources="M111",
    missed_by="every accuracy check",
    equivalent="any order of an FP32 sum of 16 terms is as good as another, and this one is fixed too",
)
def _order(op: Any, *, ids: Tensor, weights: Tensor, **rest: Any) -> Any:
    order = ids.argsort(-1)
    return op(ids=ids.gather(-1, order), weights=weights.gather(-1, order), **rest)


@SHARED(
    "moe-shared-gate-up-swapped",
    "gate and up rows of the shared expert swapped",
    kind=Kind.OPERAND,
    sources="kind of M138",
    missed_by="a packer that swaps them too",
)
def _shared_swapped(op: Any, *, gate_up: Tensor, **rest: Any) -> Any:
    return op(gate_up=gate_up.roll(gate_up.shape[0] // 2, 0), **rest)
