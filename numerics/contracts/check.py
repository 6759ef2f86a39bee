"""Is what an implementation stored among the values that its contract leaves open?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from numerics.bounds import BF16, E4M3
from numerics.contracts.bounded import Bounded
from numerics.formats import bf16, e4m3_decode, e4m3_encode

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
    """How far an output is from what its contract leaves open. Truth value: nothing lies outside."""

    count: int
    outside: int
    pinned: float
    """Share of the elements for which the contract leaves one stored value only (0 for FP32 outputs)."""
    used: float
    """Largest share of the FP32 bound that an element needs. Above 1: the factor on the bound that would pass."""
    error: float
    """Distance of that element from the exact result of the contract's own roundings, in the output's unit."""
    bound: float
    """What FP32 arithmetic in any order may contribute to that distance, before the output is rounded."""

    def __bool__(self) -> bool:
        return self.outside == 0


def compliance(stored: Tensor, expected: Expected) -> Compliance:
    """Hold stored values (bytes for E4M3) to an expected output of the same shape.

    Raises ValueError if the shapes differ or there is nothing to compare.
    """
    b = expected.before
    if stored.shape != b.value.shape or not stored.numel():
        raise ValueError(f"the contract expects {tuple(b.value.shape)}, the output has {tuple(stored.shape)}")
    got = (e4m3_decode(stored, torch.float64) if stored.dtype is torch.uint8 else stored.double()).flatten()
    value, radius = b.value.flatten(), b.radius.flatten()
    low, high = edges(expected)
    outside = ~((got >= low) & (got <= high))
    used = _used(got, value, radius, expected.fmt)
    # An element outside needs more than the whole bound, whatever the division above made of it.
    used = torch.where(outside, used.nan_to_num(nan=torch.inf).clamp_min(1.0), used)
    worst = int(used.argmax())
    return Compliance(
        count=got.numel(),
        outside=int(outside.sum()),
        pinned=0.0 if expected.fmt == "f32" else float((low == high).double().mean()),
        used=float(used[worst]),
        error=float((got[worst] - value[worst]).abs()),
        bound=float(radius[worst]),
    )


def edges(expected: Expected) -> tuple[Tensor, Tensor]:
    """Smallest and largest value that may be stored, flat."""
    value, radius = expected.before.value.flatten(), expected.before.radius.flatten()
    if expected.fmt == "f32":
        return value - radius, value + radius
    stored = _STORED[expected.fmt]
    return stored(value - radius), stored(value + radius)


def _used(got: Tensor, value: Tensor, radius: Tensor, fmt: Stored) -> Tensor:
    """Share of the radius within which some value rounds to what was stored."""
    error = (got - value).abs()
    if fmt == "f32":
        return error / radius
    used = torch.zeros_like(error)
    moved = got != _STORED[fmt](value)
    spacing = {"bf16": BF16, "e4m3": E4M3}[fmt].ulp(torch.minimum(got[moved].abs(), value[moved].abs()).nan_to_num())
    used[moved] = (error[moved] - spacing / 2).clamp_min(0.0) / radius[moved]
    return used


def _bf16(x: Tensor) -> Tensor:
    return bf16(x).double()


def _e4m3(x: Tensor) -> Tensor:
    return e4m3_decode(e4m3_encode(x), torch.float64)


_STORED = {"bf16": _bf16, "e4m3": _e4m3}
