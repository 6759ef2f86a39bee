"""RMSNorm: `y = bf(x * rsqrt(mean(x^2) + eps) * weight)`.

- x: bf16 [n, H], rows at any stride; weight: bf16 [H]; y: bf16 [n, H], fully written.
- Rounded: y, once. A CTA owns a row; the sum of squares is a tree of a fixed shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import aligned, bf16, f32


@triton.jit
def normalised(x, weight, eps, width):
    """bf(x / rms(x) * weight) of one row; x, weight: FP32, zero beyond `width`."""
    inverse = tl.rsqrt(tl.sum(x * x) * (1.0 / width) + eps)
    return bf16(x * inverse * weight)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, eps, x_stride, width, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    x = f32(tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0))
    weight = f32(tl.load(weight_ptr + i, mask=inside, other=0.0))
    tl.store(y_ptr + row * width + i, normalised(x, weight, eps, width), mask=inside)


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with one rounding, bf16 [n, H]. Contract: module docstring."""
    x = aligned(x)
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[rows,](x, weight, y, eps, x.stride(0), width, BLOCK=block, num_warps=norm_warps(block))
    return y


def norm_warps(block: int) -> int:
    """Warps of a CTA that holds a row of `block` elements: 8 elements a thread, where there are so many."""
    return min(16, max(1, block // 256))
