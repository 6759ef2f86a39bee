"""Is what an implementation stored among the values that its contract leaves open?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from numerics.bounds import BF16, E4M3, F32
from numerics.contracts.bounded import Bounded, round_bf16, round_e4m3
from numerics.formats import e4m3_decode

Stored = Literal["bf16", "f32", "e4m3"]


@dataclass(frozen=True)
class Expected:
    """One output before it is stored, and the format it is stored in; E4M3 values are in units of their scale."""

    before: Bounded
    fmt: Stored

    def __getitem__(self, index: Tensor | slice) -> Expected:
        return Expected(self.before[index], self.fmt)


@dataclass(frozen=True)
class Compliance:
    """How far an output is from what its contract leaves open. Truth value: nothing lies outside.

    `error` and `bound` belong to the element that is furthest outside (or closest to the edge), in the output's unit:
    its distance from the exact result of the contract's own roundings, and the largest distance that is allowed there.
    """

    count: int
    outside: int
    pinned: float
    """Share of the elements for which the contract leaves one value only."""
    error: float
    bound: float
    required: float
    """Factor on the bound of FP32 arithmetic that would have accepted every element."""

    def __bool__(self) -> bool:
        return self.outside == 0


def compliance(stored: Tensor, expected: Expected) -> Compliance:
    """Hold stored values (bytes for E4M3) to an expected output of the same shape.

    Raises ValueError if the shapes differ or there is nothing to compare.
    """
    b = expected.before
    if stored.shape != b.value.shape or not stored.numel():
        raise ValueError(f"the contract expects {tuple(b.value.shape)}, the output has {tuple(stored.shape)}")
    got = e4m3_decode(stored, torch.float64) if stored.dtype is torch.uint8 else stored.double()
    low, high = edges(expected)
    inside = (got >= low) & (got <= high)
    error = (got - b.value).abs()
    allowed = torch.maximum(high - b.value, b.value - low)
    excess = torch.where(inside, error / allowed.clamp_min(torch.finfo(torch.float64).tiny) * 0.5, torch.inf)
    excess = torch.where(inside, excess.clamp(max=1.0), 1.0 + torch.nan_to_num(error / allowed, nan=torch.inf))
    worst = int(excess.flatten().argmax())
    return Compliance(
        count=got.numel(),
        outside=int((~inside).sum()),
        pinned=float((low == high).double().mean()) if expected.fmt != "f32" else 0.0,
        error=float(error.flatten()[worst]),
        bound=float(allowed.flatten()[worst]),
        required=_required(got, b, expected.fmt, inside),
    )


def edges(expected: Expected) -> tuple[Tensor, Tensor]:
    """Smallest and largest value that may be stored, elementwise."""
    b = expected.before
    if expected.fmt == "f32":
        return b.value - b.radius, b.value + b.radius
    stored = round_bf16 if expected.fmt == "bf16" else round_e4m3
    ends = (stored(Bounded(end, torch.zeros_like(end))).value for end in (b.value - b.radius, b.value + b.radius))
    low, high = ends
    return low, high


def _required(got: Tensor, b: Bounded, fmt: Stored, inside: Tensor) -> float:
    """Smallest factor on the radius with which some value of the widened range rounds to what was stored."""
    if bool(inside.all()):
        return 1.0
    out, value, radius = got[~inside], b.value[~inside], b.radius[~inside]
    if not bool(out.isfinite().all()):
        return math.inf
    half = {"f32": F32, "bf16": BF16, "e4m3": E4M3}[fmt].ulp(out) / 2 if fmt != "f32" else torch.zeros_like(out)
    factors = ((out - value).abs() - half).clamp_min(0.0) / radius
    return float(factors.max()) if bool(factors.isfinite().all()) else math.inf
