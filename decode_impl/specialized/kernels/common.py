"""What the kernels share: elementary functions, casts, and the counters of the split-K reduction.

Triton's `tl.exp` is `ex2.approx(x * log2(e))`, whose relative error grows with |x|; the contract allows 2 ULP of each
function. So the functions here reduce their argument first. They call no library, and run under the interpreter too.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter (TRITON_INTERPRET=1 at import): it knows no inline PTX."""

MULTIPROCESSORS = 132
"""CTAs that fill an H200 once. A constant, not a property of the device: it decides reduction orders, hence bits."""

_COUNTERS = 1 << 16


@triton.jit
def f32(x):
    """To FP32. The interpreter's cast loses BF16's subnormal numbers, so there the bits are moved."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bf16(x):
    """FP32 to BF16, to nearest, ties to even. The interpreter's cast truncates, so there the bits are rounded."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        near = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (near >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b` of BF16 operands in FP32. The interpreter would multiply their bit patterns, hence `f32`."""
    if INTERPRETED:
        acc = tl.dot(f32(a), f32(b), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def exp(x):
    """e^x in FP32, off by less than 1 ULP. NaN stays NaN; results below FP32's least normal number are 0.

    `x = n ln 2 + r` with ln 2 in two parts, of which the first times n is exact; a polynomial for e^r, |r| <= 0.35 (a
    weighted least-squares fit of (e^r - 1 - r)/r^2, levelled to equal error); 2^n goes into the exponent bits.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
    p = ((0.0013814220728220541 * r + 0.008368898781374454) * r + 0.041668405745749496) * r + 0.1666651912892969
    near_one = 1.0 + (r + r * r * (p * r + 0.49999993346323024))
    scaled = (near_one.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    bounded = tl.where(x < -87.3, 0.0, tl.where(x > 88.7, float("inf"), scaled))
    return tl.where(x == x, bounded, x)


@triton.jit
def reciprocal(x):
    """1 / x in FP32 for 1 <= x < 2^126: the fast quotient and one Newton step, without the slow path of `div.rn`."""
    r = 1.0 / x
    return r + r * (1.0 - x * r)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) in FP32, by e^-|x|, which cannot overflow."""
    e = exp(-tl.abs(x))
    r = reciprocal(1.0 + e)
    return tl.where(x < 0, e * r, r)


@triton.jit
def tanh(x):
    """tanh in FP32: an odd polynomial up to 0.625, above it `1 - 2 / (e^2|x| + 1)`, which cancels nothing.

    The polynomial is a weighted least-squares fit of (tanh(x)/x - 1)/x^2 in x^2, levelled to equal error.
    """
    t = x * x
    p = ((-0.00566078 * t + 0.020602) * t - 0.05372923) * t + 0.13331329
    p = p * t - 0.33333278
    size = tl.abs(x)
    large = 1.0 - 2.0 * reciprocal(exp(2.0 * tl.where(size > 10.0, 10.0, size)) + 1.0)
    return tl.where(size <= 0.625, x + x * (t * p), tl.where(x < 0, -large, large))


@triton.jit
def situ(gate, up, beta, linear_beta):
    """`beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`, FP32, outer constants folded."""
    saturated = tanh(gate * (1.0 / beta)) * tanh(up * (1.0 / linear_beta))
    return saturated * sigmoid(gate) * (beta * linear_beta)


def padded_rows(rows: int) -> int:
    """Rows of a matrix-product tile: the batch bin, at least the 16 that a tensor core takes."""
    return max(16, int(triton.next_power_of_2(rows)))


def aligned(x: Tensor) -> Tensor:
    """`x` if all its rows begin at a multiple of 16 elements, else a contiguous copy.

    Triton compiles a kernel apart for strides of which it knows that, and lays rows out over threads accordingly:
    without this the order of a row's sum, and its last bit, would depend on a stride.
    """
    return x if all(stride % 16 == 0 for stride in x.stride()[:-1]) else x.contiguous()


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a split kernel was captured before it had run on this stream; run the step once, then capture"
        )
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def counters(like: Tensor, tiles: int) -> Tensor:
    """Arrival counters of `tiles` output tiles, zero before and after every launch: the last arrival resets its own.

    One array per device and stream, so that kernels which overlap on two streams never share a counter.
    """
    if tiles > _COUNTERS:
        raise ValueError(f"{tiles} output tiles given, {_COUNTERS} are allowed in one launch")
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    return _counters(like.device, stream)


@triton.jit
def to_e4m3(x):
    """FP32 to E4M3 bytes, to nearest, ties to even, saturating at +-448; NaN becomes a NaN code."""
    x = tl.minimum(tl.maximum(x, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
    if INTERPRETED:
        return _e4m3_by_bits(x)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _e4m3_by_bits(x):
    """The same by integer arithmetic: the interpreter's cast does not carry from the mantissa."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(x == x, tl.where(size < 0.015625, subnormal, normal), 0x7F)
    return (code | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def from_e4m3(x):
    """E4M3 bytes to BF16, which holds every value."""
    x = x.to(tl.float8e4nv, bitcast=True)
    if INTERPRETED:
        return bf16(x.to(tl.float32))
    else:
        return x.to(tl.bfloat16)
