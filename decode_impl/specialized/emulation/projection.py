"""Emulated projections: K is cut into slices, each accumulated in FP32, and slices are added in order."""

from __future__ import annotations

from torch import Tensor

from decode_impl.specialized.contract import split_k
from numerics.formats import bf16


def split_k_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` as FP32 sums of K slices, added in order. x: [n, K]; weight: [N, K]. Returns f32 [n, N]."""
    rows, columns = x.shape
    splits = split_k(columns, rows)
    if splits == 1:
        return x.float() @ weight.float().T
    sliced_x = x.float().view(rows, splits, -1).transpose(0, 1)
    sliced_weight = weight.float().view(weight.shape[0], splits, columns // splits).permute(1, 2, 0)
    partials = sliced_x @ sliced_weight
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


def projection(*, x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer with split K. x: bf16 [n, K]; weight: [N, K]. Returns bf16 [n, N]."""
    return bf16(split_k_product(x, weight))


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with one rounding. x: bf16 [n, H]. Returns bf16 [n, H]."""
    wide = x.float()
    inverse = (wide.square().sum(-1, keepdim=True) * (1.0 / x.shape[-1]) + eps).rsqrt()
    return bf16(wide * inverse * weight.float())
