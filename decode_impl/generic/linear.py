"""Projections and norms of the generic path: BF16 in, FP32 inside, one rounding to BF16 out."""

from __future__ import annotations

from torch import Tensor

from numerics.formats import bf16


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` with FP32 accumulation, not rounded.

    x: [n, K]; weight: [N, K]; both hold BF16 values, in BF16 or (as a CPU model keeps them) in FP32.
    Returns f32 [n, N].
    """
    return x.float() @ weight.float().T


def projection(*, x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer. x: bf16 [n, K]; weight: [N, K]. Returns bf16 [n, N]."""
    return bf16(product(x, weight))


def normalised(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last axis in FP32, not rounded. x: [..., H]. Returns f32 of the same shape."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in FP32 with a single cast at the end. x: bf16 [n, H]; weight: [H]. Returns bf16 [n, H]."""
    return bf16(normalised(x, eps) * weight.float())
