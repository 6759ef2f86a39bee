"""Error metrics of a tensor against its reference: ULP distance, RMSE, maximum, bias; and a hash of its bits.

Everything is computed in FP64. A value that is not finite is never averaged away: it is counted, and where
the reference is finite it makes the error infinite, so that no threshold can pass it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.formats import bf16

NAN_DISTANCE = torch.iinfo(torch.int64).max
"""ULP distance between a NaN and anything else."""

BIAS_FLOOR = 1 / 16
"""Smallest denominator of the signed bias, in RMS of the reference: no element then weighs more than 16
times a typical one, while a uniform relative bias on normal data is still reported within 3 %."""


@dataclass(frozen=True)
class ErrorStats:
    """Error of one tensor against its FP64 reference. `rmse` and `max_abs` are in the reference's own unit.

    `rmse`, `max_abs` and both biases are over the elements whose reference is finite. They are infinite
    where the candidate has a NaN or an infinity at one of those elements.
    """

    count: int
    reference_nonfinite: int
    """Elements left out because the reference itself is NaN or infinite."""
    candidate_nan: int
    candidate_inf: int
    rmse: float
    rmse_ratio: float
    """`rmse` over the RMS of the reference."""
    max_abs: float
    bias: float
    """Mean of error / |reference|: a shift towards plus or minus infinity."""
    radial_bias: float
    """Mean of error * sign(reference) / |reference|: a shift away from (or, negative, towards) zero."""

    @property
    def finite(self) -> bool:
        return not (self.reference_nonfinite or self.candidate_nan or self.candidate_inf)


def error_stats(candidate: Tensor, reference: Tensor) -> ErrorStats:
    """Compare a tensor of any floating dtype with a reference of the same shape (taken to float64).

    Raises ValueError if the shapes differ or nothing can be compared.
    """
    if candidate.shape != reference.shape or not candidate.numel():
        raise ValueError(
            "error_stats needs two tensors of one shape with at least one element, got "
            f"{tuple(candidate.shape)} and {tuple(reference.shape)}"
        )
    c, r = candidate.detach().double().flatten(), reference.detach().double().flatten()
    judged = r.isfinite()
    nan, inf = int(c[judged].isnan().sum()), int(c[judged].isinf().sum())
    rmse = ratio = largest = bias = radial = math.inf
    if not nan and not inf and bool(judged.any()):
        r, error = r[judged], c[judged] - r[judged]
        rmse, norm, largest = root_mean_square(error), root_mean_square(r), float(error.abs().max())
        ratio = rmse / norm if norm else (math.inf if rmse else 0.0)
        relative = error / r.abs().clamp(min=max(norm * BIAS_FLOOR, torch.finfo(torch.float64).tiny))
        bias, radial = float(relative.mean()), float((relative * r.sign()).mean())
    return ErrorStats(
        count=c.numel(),
        reference_nonfinite=c.numel() - int(judged.sum()),
        candidate_nan=nan,
        candidate_inf=inf,
        rmse=rmse,
        rmse_ratio=ratio,
        max_abs=largest,
        bias=bias,
        radial_bias=radial,
    )


def root_mean_square(x: Tensor) -> float:
    """RMS over all elements in FP64, scaled by the largest so that squares neither overflow nor vanish."""
    x = x.double()
    largest = float(x.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float((x / largest).square().mean().sqrt())


def ulp_distance(a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Number of representable values of `dtype` between a and b, after rounding both to it (to nearest even).

    a, b: floating tensors of one shape; dtype: bfloat16 or float32. Returns int64 of that shape. +0 and -0
    are the same value, infinity is one step beyond the largest finite, two NaNs are 0 apart and a NaN is
    `NAN_DISTANCE` from anything else.
    """
    distance = (_ordinal(a, dtype) - _ordinal(b, dtype)).abs()
    distance = torch.where(a.isnan() | b.isnan(), NAN_DISTANCE, distance)
    return torch.where(a.isnan() & b.isnan(), 0, distance)


@dataclass(frozen=True)
class UlpHistogram:
    """ULP distances in log2 bins: `counts[0]` holds 0, `counts[i]` holds 2^(i-1) to 2^i - 1; NaNs apart."""

    counts: tuple[int, ...]
    nan: int
    """Elements where exactly one side is NaN."""

    @property
    def largest(self) -> int:
        """Upper edge of the last bin: no counted distance exceeds it."""
        return 0 if len(self.counts) == 1 else 2 ** (len(self.counts) - 1) - 1

    def __str__(self) -> str:
        labels = ["0", "1", *(f"{2 ** (i - 1)}-{2**i - 1}" for i in range(2, len(self.counts)))]
        bins = [f"{label}: {n}" for label, n in zip(labels, self.counts, strict=False) if n]
        return ", ".join(bins + ([f"NaN: {self.nan}"] if self.nan else []))


def ulp_histogram(a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16) -> UlpHistogram:
    """Histogram of `ulp_distance(a, b, dtype)` over all elements."""
    distance = ulp_distance(a, b, dtype).flatten()
    nan = distance == NAN_DISTANCE
    # frexp's exponent of an integer below 2^53 is its bit length, which is the bin.
    _, bins = torch.frexp(distance[~nan].double())
    return UlpHistogram(tuple(torch.bincount(bins.long(), minlength=1).tolist()), int(nan.sum()))


def tensor_hash(x: Tensor) -> str:
    """SHA-256 (hex) over dtype, shape and element bytes in row-major order: equal if and only if the bits
    are.

    Strides and device do not enter; -0 and +0, and NaNs of different payloads, differ.
    """
    flat = x.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _ordinal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Signed position of a value among the values of `dtype`; both zeros are 0."""
    if dtype is torch.bfloat16:
        bits = bf16(x).view(torch.int16).long()
        magnitude = bits & 0x7FFF
    elif dtype is torch.float32:
        bits = x.to(torch.float32).view(torch.int32).long()
        magnitude = bits & 0x7FFFFFFF
    else:
        raise TypeError(f"ULP distance is defined for bfloat16 and float32, got {dtype}")
    return torch.where(bits < 0, -magnitude, magnitude)
