"""FP64 values with a radius: what an FP32 computation in any order may return, and no more.

`Bounded(value, radius)` stands for all results within `value +- radius`. Arithmetic adds the rounding of the FP32
operation that it stands for; rounding to a narrower format takes the radius back to exactly 0 wherever every candidate
rounds to one value. So a chain of FP32 steps and BF16 roundings ends in a few values an output may have, mostly one.

Sums: up to 64 terms, gamma_n sum|t| holds for every order (Higham, 2002, section 3.1). Longer sums use the model of
independent roundings (Higham and Mary, 2019): n rounding errors of at most u times a partial sum exceed
LAMBDA sqrt(n) u max|partial sum| with probability 2 exp(-LAMBDA^2 / 2) at most, and in practice never, since most
roundings and most partial sums are far smaller. Partial sums of terms that are not ordered against us stay below
|sum| + KAPPA sqrt(sum t^2) (Hoeffding, 1963, for sampling without replacement).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numerics.bounds import BF16, F32, gamma
from numerics.formats import bf16

U = F32.unit_roundoff
TINY = 2.0**-149
"""Spacing of FP32 at and below its least normal number: what a rounding may cost there."""

LEAST_NORMAL = 2.0**-126

LAMBDA = 4.0
KAPPA = 3.0
SHORT_SUM = 64
ELEMENTARY_ULPS = 4.0
"""Error of an FP32 exp, sigmoid, tanh, log2 or rsqrt, in units of U: the libraries stay below 4 (2 ULP)."""


@dataclass(frozen=True)
class Bounded:
    """All FP64 tensors within `radius` of `value`, elementwise. Shapes agree."""

    value: Tensor
    radius: Tensor

    def __getitem__(self, index: Any) -> Bounded:
        return Bounded(self.value[index], self.radius[index])

    def map(self, move: Callable[[Tensor], Tensor]) -> Bounded:
        """The same movement of elements (a view, a gather, a concatenation) of value and radius."""
        return Bounded(move(self.value), move(self.radius))

    @property
    def size(self) -> Tensor:
        """Largest magnitude that an element may have."""
        return self.value.abs() + self.radius


def exact(x: Tensor) -> Bounded:
    """A stored input: its value and no doubt about it."""
    value = x.double()
    return Bounded(value, torch.zeros_like(value))


def rounded_f32(x: Bounded, roundings: float = 1.0) -> Bounded:
    """`x` after some FP32 roundings."""
    return Bounded(x.value, x.radius + roundings * U * x.size + TINY)


def add(a: Bounded, b: Bounded) -> Bounded:
    """a + b, one rounding; none where FP32 holds the sum of two exact terms."""
    both = Bounded(a.value + b.value, a.radius + b.radius)
    terms = torch.stack(torch.broadcast_tensors(a.value, b.value))
    known = (both.radius == 0) & _held_by_f32(terms, 0)
    return Bounded(both.value, torch.where(known, 0.0, add_rounded(a, b).radius))


def add_rounded(a: Bounded, b: Bounded) -> Bounded:
    """a + b, one rounding, where the terms are not exact anyway (and many)."""
    return rounded_f32(Bounded(a.value + b.value, a.radius + b.radius))


def mul(a: Bounded, b: Bounded, roundings: float = 1.0) -> Bounded:
    """a * b, one rounding unless said otherwise."""
    radius = a.value.abs() * b.radius + a.radius * b.size
    return rounded_f32(Bounded(a.value * b.value, radius), roundings)


def scaled(a: Bounded, factor: float) -> Bounded:
    """a times a constant that is itself rounded to FP32: two roundings."""
    return rounded_f32(Bounded(a.value * factor, a.radius * abs(factor)), 2.0)


def shifted(a: Bounded, constant: float) -> Bounded:
    """a plus a constant that is itself rounded to FP32."""
    return rounded_f32(Bounded(a.value + constant, a.radius + U * abs(constant)))


def total(a: Bounded, dim: int = -1, keepdim: bool = False) -> Bounded:
    """Sum over one axis, in any order."""
    value = a.value.sum(dim, keepdim=keepdim)
    norm = _norm_or_sum(a.value, dim, keepdim)
    return Bounded(value, a.radius.sum(dim, keepdim=keepdim) + _sum_error(a.value.shape[dim], value, norm))


def total_of_parts(parts: list[Bounded]) -> Bounded:
    """Sum of a few tensors in any order; exact where the terms are and FP32 holds all partial sums."""
    terms = Bounded(torch.stack([p.value for p in parts]), torch.stack([p.radius for p in parts]))
    joined = total(terms, 0)
    known = (terms.radius == 0).all(0) & _held_by_f32(terms.value, 0)
    return Bounded(joined.value, torch.where(known, 0.0, joined.radius))


def matmul(a: Bounded, b: Bounded) -> Bounded:
    """a @ b with FP32 accumulation in any order; b [..., K, N]."""
    value, K = a.value @ b.value, a.value.shape[-1]
    if K <= SHORT_SUM:
        norm = a.value.abs() @ b.value.abs()
    else:
        norm = (a.value.square() @ b.value.square()).sqrt()
    radius = _sum_error(K, value, norm)
    if bool(a.radius.any()):
        radius = radius + a.radius @ b.value.abs()
    if bool(b.radius.any()):
        radius = radius + a.size @ b.radius
    return Bounded(value, radius)


def linear(x: Bounded, weight: Tensor) -> Bounded:
    """x W^T. x [..., K]; weight [N, K], stored values."""
    return matmul(x, exact(weight.T))


def dot(a: Bounded, b: Bounded, keepdim: bool = False) -> Bounded:
    """Sum of a * b over the last axis."""
    terms = Bounded(a.value * b.value, a.value.abs() * b.radius + a.radius * b.size)
    return total(terms, -1, keepdim)


def monotone(f: Callable[[Tensor], Tensor], a: Bounded) -> Bounded:
    """A monotone elementary function."""
    value = f(a.value)
    if bool(a.radius.any()):
        ends = f(a.value + a.radius), f(a.value - a.radius)
        radius = torch.maximum((ends[0] - value).abs(), (ends[1] - value).abs())
    else:
        radius = torch.zeros_like(value)
    # A library may flush a result below the least normal number to zero.
    return Bounded(value, radius + ELEMENTARY_ULPS * U * (value.abs() + radius) + LEAST_NORMAL)


def exp(a: Bounded) -> Bounded:
    return monotone(torch.exp, a)


def sigmoid(a: Bounded) -> Bounded:
    return monotone(torch.sigmoid, a)


def tanh(a: Bounded) -> Bounded:
    return monotone(torch.tanh, a)


def rsqrt(a: Bounded) -> Bounded:
    """1 / sqrt(a); a is positive."""
    return monotone(lambda x: x.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), a)


def reciprocal(a: Bounded) -> Bounded:
    """1 / a; a is positive."""
    return monotone(lambda x: x.clamp_min(torch.finfo(torch.float64).tiny).reciprocal(), a)


def round_bf16(a: Bounded) -> Bounded:
    """Rounded to BF16: no doubt is left where both ends of the radius round to one value."""
    value, high, low = (bf16(x).double() for x in (a.value, a.value + a.radius, a.value - a.radius))
    return Bounded(value, torch.maximum(high - value, value - low))


def concatenated(parts: list[Bounded], dim: int = -1) -> Bounded:
    """Parts joined along one axis."""
    return Bounded(torch.cat([p.value for p in parts], dim), torch.cat([p.radius for p in parts], dim))


def normalised(x: Bounded, eps: float) -> Bounded:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    mean = scaled(dot(x, x, keepdim=True), 1.0 / x.value.shape[-1])
    return mul(x, rsqrt(shifted(mean, eps)))


def _held_by_f32(terms: Tensor, dim: int) -> Tensor:
    """Whether FP32 holds every partial sum of the terms along `dim`, in any order.

    All partial sums are multiples of the terms' finest spacing and at most sum|t|; 24 bits hold them if that is below
    2^24 spacings. Terms that BF16 holds have BF16's spacing.
    """
    spacing: Tensor = torch.where(bf16(terms).double() == terms, BF16.ulp(terms), F32.ulp(terms))
    spacing = torch.where(terms == 0, torch.inf, spacing).amin(dim)
    held: Tensor = terms.abs().sum(dim) <= 2.0**24 * spacing
    return held


def _norm_or_sum(terms: Tensor, dim: int, keepdim: bool) -> Tensor:
    if terms.shape[dim] <= SHORT_SUM:
        return terms.abs().sum(dim, keepdim=keepdim)
    return terms.square().sum(dim, keepdim=keepdim).sqrt()


def _sum_error(n: int, value: Tensor, norm: Tensor) -> Tensor:
    """Error of an FP32 sum of n terms; `norm` is sum|t| of a short sum and sqrt(sum t^2) of a long one.

    Every term may be a product that underflowed.
    """
    arithmetic = gamma(n, U) * norm if n <= SHORT_SUM else LAMBDA * n**0.5 * U * (value.abs() + KAPPA * norm)
    return torch.add(arithmetic, n * TINY)
