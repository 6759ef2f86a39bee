"""The MXFP4 tile product: codes stay packed until they are in the registers of the tensor core's left operand."""

from __future__ import annotations

import triton
import triton.language as tl

from decode_impl.specialized.kernels.common import INTERPRETED, f32


@triton.jit
def mxfp4_dot(codes, scale, x, acc, ROWS: tl.constexpr, K: tl.constexpr):
    """`acc + dequantised(codes, scale) @ x` in FP32.

    codes: u8 [ROWS, K/2], low nibble first; scale: u8 (E8M0) [ROWS, K/32]; x: bf16 [K, n]. The product of a code and
    its scale is exact in BF16 for scales from 2^-125 to 2^125; a scale code of 0 (2^-127) counts as 0. Hopper has no
    FP4 tensor core: `dot_scaled` widens codes to BF16 in registers there.
    """
    if INTERPRETED:
        acc = tl.dot(_dequantised(codes, scale, ROWS, K), f32(x), acc, input_precision="ieee")
    else:
        acc = tl.dot_scaled(codes, scale, "e2m1", x, None, "bf16", acc)
    return acc


@triton.jit
def _dequantised(codes, scale, ROWS: tl.constexpr, K: tl.constexpr):
    """FP32 [ROWS, K], for the interpreter."""
    code = tl.reshape(tl.join(codes & 0xF, codes >> 4), [ROWS, K]).to(tl.int32)
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    factor = tl.where(scale == 255, float("nan"), tl.exp2(scale.to(tl.float32) - 127.0))
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [ROWS, K // 32, 32]), [ROWS, K])
    return tl.where(code >= 8, -size, size) * factor
