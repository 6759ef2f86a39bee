"""What error rounding alone explains, and the rule that accepts or refuses a measured one.

The rule: `error_specialised <= 2 * error_generic + floor`, for the RMSE and for the maximum, both measured
against FP64 on the same stored inputs. Practice behind the shape of it: PyTorch's `same()` judges a
compiled result by its error against FP64 relative to the eager result's own, allowing 2 to 3 times;
FlashAttention's tests allow twice the error of the BF16 reference plus a rounding floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.metrics import ErrorStats, root_mean_square

ALLOWED_MULTIPLE = 2.0
"""Another summation order or tiling legitimately costs up to about twice the error; a wrong intermediate
precision costs 10 times and more (BF16 against FP32: 2^16)."""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: significand bits with the hidden one, and the exponent of its least
    normal."""

    name: str
    precision: int
    min_exponent: int

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal value to nearest: 2^-precision."""
        return 2.0**-self.precision

    def ulp(self, x: Tensor) -> Tensor:
        """Spacing of the format's values at |x|, float64 of x's shape; at and below the least normal it is
        constant."""
        _, exponent = torch.frexp(x.double())  # |x| in [2^(exponent-1), 2^exponent)
        exponent = torch.where(x == 0, self.min_exponent, exponent - 1).clamp(min=self.min_exponent)
        return torch.exp2((exponent - (self.precision - 1)).double())


BF16 = FloatFormat("bf16", 8, -126)
F32 = FloatFormat("f32", 24, -126)
F64 = FloatFormat("f64", 53, -1022)
E4M3 = FloatFormat("e4m3", 4, -6)


@dataclass(frozen=True)
class Floor:
    """Error that rounding the exact result to the output format makes: RMS and maximum, in the output's
    unit."""

    rms: float
    max: float


def output_floor(reference: Tensor, fmt: FloatFormat, scale: float = 1.0) -> Floor:
    """Floor of an output stored in `fmt` as value / scale (FP8 caches; 1 elsewhere), for these reference
    values.

    Rounding to nearest errs by at most ulp/2 and, spread evenly over the ulp, by ulp/sqrt(12) in RMS.
    reference: any float tensor of finite values. Raises ValueError on NaN or infinity.
    """
    if not bool(reference.isfinite().all()):
        raise ValueError("the floor of an output needs a finite reference")
    ulp = fmt.ulp(reference.double() / scale) * abs(scale)
    return Floor(rms=root_mean_square(ulp) / math.sqrt(12), max=float(ulp.max()) / 2)


def gamma(n: int, unit_roundoff: float) -> float:
    """gamma_n = n u / (1 - n u), the growth of n successive roundings (Higham, 2002, lemma 3.1).

    Raises ValueError if n u reaches 1, where the bound says nothing.
    """
    if n * unit_roundoff >= 1:
        raise ValueError(f"{n} roundings with unit roundoff {unit_roundoff:g} have no error bound")
    return n * unit_roundoff / (1 - n * unit_roundoff)


def dot_product_bound(x: Tensor, y: Tensor, fmt: FloatFormat = F32) -> Tensor:
    """Forward error bound of sum(x * y) over the last axis in `fmt`, in any order: gamma_K * sum |x||y|.

    x, y: [..., K], broadcastable. Returns float64 [...]. Products that `fmt` holds exactly (BF16 by BF16
    in FP32) cost no rounding of their own, which the bound does not use. Source: Higham, 2002, section 3.1.
    """
    return gamma(x.shape[-1], fmt.unit_roundoff) * (x.double().abs() * y.double().abs()).sum(-1)


@dataclass(frozen=True)
class Acceptance:
    """One error against what is allowed. Truth value: whether it is accepted."""

    measured: float
    allowed: float
    required_multiple: float
    """Multiple of the baseline's error that would have accepted it; infinity if none would."""

    @property
    def ratio(self) -> float:
        """Measured over allowed; above 1 fails."""
        if self.allowed == 0:
            return 0.0 if self.measured == 0 else math.inf
        return self.measured / self.allowed

    def __bool__(self) -> bool:
        # An allowance that is not finite comes from a broken baseline and accepts nothing.
        return math.isfinite(self.measured) and math.isfinite(self.allowed) and self.measured <= self.allowed

    def __str__(self) -> str:
        relation = "<=" if self else ">"
        return (
            f"{self.measured:.3g} {relation} allowed {self.allowed:.3g} "
            f"(a multiple of {self.required_multiple:.3g} would pass)"
        )


def accept(measured: float, baseline: float, floor: float, multiple: float = ALLOWED_MULTIPLE) -> Acceptance:
    """Apply `measured <= multiple * baseline + floor`. All three errors in the same unit."""
    if measured <= floor:
        required = 0.0
    elif baseline > 0 and math.isfinite(baseline) and math.isfinite(measured):
        required = (measured - floor) / baseline
    else:
        required = math.inf
    return Acceptance(measured, multiple * baseline + floor, required)


@dataclass(frozen=True)
class Judgement:
    """The rule applied to the RMSE and to the maximum. Truth value: both accepted and every element
    finite."""

    rmse: Acceptance
    max: Acceptance

    def __bool__(self) -> bool:
        return bool(self.rmse) and bool(self.max)

    def __str__(self) -> str:
        return f"rmse {self.rmse}; max {self.max}"


def judge(candidate: ErrorStats, baseline: ErrorStats, floor: Floor, multiple: float = ALLOWED_MULTIPLE) -> Judgement:
    """Judge a candidate's error by the baseline's own, both against the same FP64 reference.

    A NaN or an infinity in the candidate or the baseline makes its error infinite and is refused.
    """
    return Judgement(
        accept(candidate.rmse, baseline.rmse, floor.rms, multiple),
        accept(candidate.max_abs, baseline.max_abs, floor.max, multiple),
    )
