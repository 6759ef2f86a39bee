"""Promises of `numerics.formats`, tested exhaustively against references that share no code with it."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.formats import (
    E2M1_VALUES,
    E4M3_MAX,
    MXFP4_BLOCK,
    bf16,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode,
    mxfp4_dequantise,
    mxfp4_quantise,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def all_bf16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def e4m3_value(code: int) -> float:
    """The E4M3FN value of a code from its fields: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def nearest_e4m3(x: Tensor) -> Tensor:
    """Brute force: the code of x's sign that is nearest, the even one of two equally near."""
    values = torch.tensor([e4m3_value(c) for c in range(127)], dtype=torch.float64)
    distance = (x.double().abs().clamp(max=448.0)[:, None] - values).abs()
    best = distance.amin(1, keepdim=True)
    odd = torch.arange(127) % 2
    code = torch.where(distance == best, odd, 2).argmin(1)
    return torch.where(torch.signbit(x), code + 128, code).to(torch.uint8)


def bf16_of_double(x: float) -> int:
    """BF16 bits of a finite double by exact rational arithmetic, ties to even."""
    magnitude = abs(Fraction(x))
    sign = 0x8000 if math.copysign(1.0, x) < 0 else 0
    if magnitude == 0:
        return sign
    exponent = max(math.frexp(float(magnitude))[1] - 1, -126)
    steps = round(magnitude / Fraction(2) ** (exponent - 7))  # Python rounds a Fraction half to even
    bits = steps if exponent == -126 else ((exponent + 126) << 7) + steps  # a carry moves into the exponent
    return sign | min(bits, 0x7F80)


def bits_of(x: Tensor) -> int:
    return int(x.view(torch.int16).item()) & 0xFFFF


class TestBF16:
    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=1000, deadline=None)
    def test_float32_rounds_as_integer_arithmetic_does(self, pattern: int) -> None:
        x = torch.tensor([struct.unpack("<f", struct.pack("<I", pattern))[0]], dtype=torch.float32)
        got = bits_of(bf16(x))
        if pattern & 0x7FFFFFFF > 0x7F800000:
            assert got & 0x7FFF > 0x7F80
        else:
            assert got == (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16

    @given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e39, max_value=1e39))
    @settings(max_examples=1000, deadline=None)
    def test_float64_rounds_once(self, x: float) -> None:
        assert bits_of(bf16(torch.tensor([x], dtype=torch.float64))) == bf16_of_double(x)

    @given(st.integers(0x0000, 0x7F7E), st.integers(-1, 1), st.integers(1, 2**20))
    @settings(max_examples=1000, deadline=None)
    def test_float64_next_to_a_tie_goes_to_the_nearer_side(self, low: int, side: int, ulps: int) -> None:
        pair = torch.tensor([low, low + 1], dtype=torch.int16).view(torch.bfloat16).double()
        tie = pair.mean()
        x = (tie.view(torch.int64) + side * ulps).view(torch.float64)
        expected = {-1: low, 0: low + (low & 1), 1: low + 1}[side]
        assert bits_of(bf16(x[None])) == expected
        assert bits_of(bf16(-x[None])) == expected | 0x8000

    def test_a_value_that_double_rounding_gets_wrong_is_right(self) -> None:
        x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
        assert x.float().bfloat16().item() == 1.0
        assert bf16(x).item() == 1 + 2**-7

    def test_bf16_values_and_special_values_pass_unchanged_from_every_dtype(self) -> None:
        x = all_bf16()
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            y = bf16(x.to(dtype))
            assert torch.equal(y.isnan(), x.isnan())
            assert torch.equal(y.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])


class TestE4M3:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_every_bf16_value_takes_the_nearest_code(self, dtype: torch.dtype) -> None:
        x = all_bf16()
        codes = e4m3_encode(x.to(dtype))
        nan = x.isnan()
        assert bool(((codes[nan] & 0x7F) == 0x7F).all())
        assert torch.equal(codes[~nan], nearest_e4m3(x[~nan]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_just_beside_a_tie_take_the_nearer_code(self, dtype: torch.dtype) -> None:
        values = torch.tensor([e4m3_value(c) for c in range(127)], dtype=torch.float64)
        ties = ((values[1:] + values[:-1]) / 2).to(dtype)
        for toward, expected in ((math.inf, torch.arange(1, 127)), (-math.inf, torch.arange(126))):
            x = torch.nextafter(ties, torch.full_like(ties, toward))
            assert torch.equal(e4m3_encode(x), expected.to(torch.uint8))
            assert torch.equal(e4m3_encode(-x), (expected + 128).to(torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_every_code_decodes_to_its_value_and_back(self, dtype: torch.dtype) -> None:
        values = e4m3_decode(ALL_BYTES, dtype)
        expected = torch.tensor([e4m3_value(c) for c in range(256)], dtype=torch.float64)
        assert values.dtype is dtype
        assert torch.equal(values.double().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
        finite = ~expected.isnan()
        assert int(finite.sum()) == 254
        assert torch.equal(e4m3_encode(values)[finite], ALL_BYTES[finite])

    def test_overflow_saturates_and_nan_stays_nan(self) -> None:
        x = torch.tensor([448.1, 464.0, 465.0, 1e30, math.inf, -449.0, -math.inf, math.nan])
        values = e4m3_decode(e4m3_encode(x))
        assert values[:7].tolist() == [E4M3_MAX] * 5 + [-E4M3_MAX] * 2
        assert values[7].isnan()

    def test_shape_and_strides_of_the_input_do_not_matter(self) -> None:
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
        assert torch.equal(e4m3_encode(x.T), e4m3_encode(x).T)
        assert torch.equal(e4m3_decode(e4m3_encode(x).T), e4m3_decode(e4m3_encode(x)).T)

    def test_decoding_anything_but_bytes_is_refused(self) -> None:
        with pytest.raises(TypeError, match="uint8"):
            e4m3_decode(torch.zeros(4, dtype=torch.int64))


class TestE8M0:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_every_code_is_its_power_of_two_and_encodes_back(self, dtype: torch.dtype) -> None:
        values = e8m0_decode(ALL_BYTES, dtype)
        assert values[:255].double().tolist() == [2.0 ** (c - 127) for c in range(255)]
        assert values[255].isnan()
        assert torch.equal(e8m0_encode(values), ALL_BYTES)

    @pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 2.0**-128, math.inf])
    def test_a_value_without_an_exact_code_is_refused(self, value: float) -> None:
        with pytest.raises(ValueError, match="powers of two"):
            e8m0_encode(torch.tensor([value], dtype=torch.float64))


class TestMXFP4:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_every_code_under_every_scale_is_exact(self, dtype: torch.dtype) -> None:
        codes = torch.arange(MXFP4_BLOCK, dtype=torch.uint8) % 16
        packed = (codes[0::2] | (codes[1::2] << 4)).expand(256, -1).contiguous()
        got = mxfp4_dequantise(packed, ALL_BYTES[:, None], dtype)
        largest = torch.finfo(dtype).max
        for scale in range(255):
            for code in range(16):
                exact = (-1 if code & 8 else 1) * E2M1_VALUES[code & 7] * 2.0 ** (scale - 127)
                expected = exact if abs(exact) <= largest else math.copysign(math.inf, exact)
                value = got[scale, code].item()
                assert value == expected
                assert math.copysign(1, value) == math.copysign(1, exact)
        assert bool(got[255].isnan().all())

    def test_the_first_element_sits_in_the_low_nibble(self) -> None:
        w = torch.zeros(1, 32)
        w[0, 0], w[0, 1] = 6.0, -1.0
        packed, scale = mxfp4_quantise(w)
        assert packed[0, 0].item() == 0x7 | (0xA << 4)
        assert scale.item() == 127

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_quantisation_takes_the_nearest_value_under_the_smallest_scale_that_does_not_clip(
        self, dtype: torch.dtype
    ) -> None:
        gen = torch.Generator().manual_seed(3)
        w = torch.randn(64, 96, generator=gen, dtype=torch.float64)
        w = (w * torch.exp2(torch.randint(-100, 100, (64, 1), generator=gen).double())).to(dtype)
        packed, scale = mxfp4_quantise(w)
        got = mxfp4_dequantise(packed, scale, torch.float64).view(64, 3, 32)
        blocks = w.double().view(64, 3, 32)
        step = torch.exp2(scale.double() - 127)
        amax = blocks.abs().amax(-1)
        assert bool((amax <= 6 * step).all())
        assert bool((amax > 3 * step).all())
        grid = torch.tensor([s * v for v in E2M1_VALUES for s in (1, -1)], dtype=torch.float64)
        nearest = (blocks[..., None] / step[..., None, None] - grid).abs().amin(-1) * step[..., None]
        assert torch.equal((got - blocks).abs(), nearest)

    def test_ties_go_to_the_even_code_and_minus_zero_keeps_its_sign(self) -> None:
        w = torch.zeros(32)
        w[:9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0])
        packed, scale = mxfp4_quantise(w)
        got = mxfp4_dequantise(packed, scale)[:9]
        assert got.tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]
        assert bool(torch.signbit(got[8]))

    def test_quantising_what_was_dequantised_changes_no_value(self) -> None:
        w = torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
        once = mxfp4_dequantise(*mxfp4_quantise(w))
        assert torch.equal(mxfp4_dequantise(*mxfp4_quantise(once)), once)

    def test_zero_blocks_and_values_below_the_range_become_zero(self) -> None:
        tiny = torch.full((1, 32), 2.0**-149)
        packed, scale = mxfp4_quantise(torch.cat([torch.zeros(1, 32), tiny]))
        assert scale.flatten().tolist() == [127, 0]
        assert bool((mxfp4_dequantise(packed, scale) == 0).all())

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 7 * 2.0**127])
    def test_a_value_that_cannot_be_held_is_refused(self, bad: float) -> None:
        w = torch.zeros(1, 32, dtype=torch.float64)
        w[0, 5] = bad
        with pytest.raises(ValueError, match="finite"):
            mxfp4_quantise(w)

    def test_shapes_that_do_not_belong_together_are_refused(self) -> None:
        with pytest.raises(ValueError, match="multiple of 32"):
            mxfp4_quantise(torch.zeros(2, 40))
        with pytest.raises(ValueError, match="one scale per 32"):
            mxfp4_dequantise(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
