"""The MXFP4 tile product: eight codes to a word, widened to BF16 in the registers of the tensor core's left operand.

Nibble j of every word of a tile is one operand: a product over K is eight products, each over the columns j, j+8, j+16
... of a block, so no code has to change its place. A code's bits go straight into a BF16 number 2^126 too small (its
three low bits are two of the exponent and one of the mantissa; 0.5 becomes a subnormal number), and two exact products
bring that to the code's value times its scale: two to three instructions a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_impl.specialized.kernels.common import INTERPRETED, bf16, dot, f32


def _widen(nibble: int) -> str:
    """PTX: $0 = two BF16 values, of the given nibble of words $1 and $2 times the BF16 factors $3.

    Byte `nibble / 2` of both words comes to lie below a half each; a product with 2^12 + 2^6 (or 2^8 + 2^2) copies the
    code to where its sign and its other bits belong.
    """
    byte, high = divmod(nibble, 2)
    select = f"0x{4 + byte:x}{4 + byte:x}{byte:x}{byte:x}"
    code, places = ("0x00F000F0", "0x104") if high else ("0x000F000F", "0x1040")
    return (
        "{ .reg .b32 t, u; "
        f"prmt.b32 t, $1, $2, {select}; and.b32 t, t, {code}; mul.lo.u32 t, t, {places}; and.b32 t, t, 0x81C081C0; "
        "mov.b32 u, 0x7E807E80; mul.rn.bf16x2 t, t, u; mul.rn.bf16x2 $0, t, $3; }"
    )


_PTX = tl.constexpr(tuple(_widen(nibble) for nibble in range(8)))


@triton.jit
def scale_factors(scale, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """BF16 [ROWS, WORDS], the factor of each word, from E8M0 codes u8 [ROWS, WORDS / 4].

    Exact from 2^-126 to 2^127; code 0 (2^-127) counts as 0, and 255 is NaN.
    """
    bits = tl.where(scale == 255, 0x7FC0, scale.to(tl.int16) << 7).to(tl.int16)
    factor = tl.broadcast_to(bits[:, :, None], [ROWS, WORDS // 4, 4])
    return tl.reshape(factor, [ROWS, WORDS]).to(tl.bfloat16, bitcast=True)


@triton.jit
def mxfp4_dot(words, factor, x, count, acc, EVEN_K: tl.constexpr):
    """`acc + w @ x` in FP32, `w` the values of i32 `words` [ROWS, WORDS] times BF16 `factor` of the same shape.

    `x` points at BF16 [WORDS, n]: the column that belongs to nibble 0 of each word; those of nibble j lie j elements
    further. `count`: i32 [WORDS, 1], how many columns of each word exist, where not all do.
    """
    for j in tl.static_range(8):
        if EVEN_K:
            columns = tl.load(x + j)
        else:
            columns = tl.load(x + j, mask=j < count, other=0.0)
        acc = dot(_widened(words, factor, j), columns, acc)
    return acc


@triton.jit
def _widened(words, factor, NIBBLE: tl.constexpr):
    """BF16 values of one nibble of all words."""
    if INTERPRETED:
        return _by_arithmetic(words, factor, NIBBLE)
    else:
        return tl.inline_asm_elementwise(
            _PTX[NIBBLE], "=r,r,r,r", [words, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _by_arithmetic(words, factor, NIBBLE: tl.constexpr):
    """The same, for the interpreter, which knows no PTX."""
    code = (words >> (4 * NIBBLE)) & 15
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return bf16(tl.where(code >= 8, -size, size) * f32(factor))
