"""Promises of `numerics.metrics`."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.metrics import NAN_DISTANCE, error_stats, tensor_hash, ulp_distance, ulp_histogram


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestErrorStats:
    def test_figures_of_a_worked_example(self) -> None:
        stats = error_stats(torch.tensor([1.5, -2.0, 4.0, -4.5]), torch.tensor([1.0, -2.0, 4.0, -4.0]))
        assert stats.rmse == pytest.approx(math.sqrt(0.5 / 4))
        assert stats.rmse_ratio == pytest.approx(math.sqrt(0.5 / 37))
        assert stats.max_abs == 0.5
        assert stats.bias == pytest.approx((0.5 - 0.125) / 4)
        assert stats.radial_bias == pytest.approx((0.5 + 0.125) / 4)
        assert stats.finite

    def test_a_uniform_relative_error_shows_as_radial_bias_and_not_as_a_shift(self) -> None:
        reference = normal(100_000)
        stats = error_stats(reference * 1.01, reference)
        assert stats.radial_bias == pytest.approx(0.01, rel=0.03)
        assert abs(stats.bias) < 2e-4

    def test_truncation_is_biased_and_rounding_is_not(self) -> None:
        reference = normal(100_000).float()
        truncated = (reference.view(torch.int32) & ~0xFFFF).view(torch.float32)
        assert error_stats(truncated, reference).radial_bias < -1e-3
        assert abs(error_stats(reference.bfloat16(), reference).radial_bias) < 5e-5

    def test_a_zero_in_the_reference_does_not_blow_the_bias_up(self) -> None:
        stats = error_stats(torch.tensor([1e-3, 1.0]), torch.tensor([0.0, 1.0]))
        assert 0 < stats.bias < 0.02

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_one_nonfinite_element_is_counted_and_makes_every_error_infinite(self, bad: float) -> None:
        reference = normal(1000)
        candidate = reference.clone()
        candidate[17] = bad
        stats = error_stats(candidate, reference)
        assert (stats.candidate_nan, stats.candidate_inf) == ((1, 0) if math.isnan(bad) else (0, 1))
        assert stats.rmse == stats.rmse_ratio == stats.max_abs == math.inf
        assert not stats.finite

    def test_elements_without_a_finite_reference_are_left_out_and_counted(self) -> None:
        stats = error_stats(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, math.nan, 2.0]))
        assert stats.reference_nonfinite == 1
        assert stats.candidate_nan == 0
        assert stats.max_abs == 1.0
        assert not stats.finite

    def test_a_zero_reference_gives_ratio_zero_only_to_a_zero_candidate(self) -> None:
        zero = torch.zeros(3)
        assert error_stats(zero, zero).rmse_ratio == 0.0
        assert error_stats(zero + 1e-30, zero).rmse_ratio == math.inf

    def test_errors_near_the_ends_of_fp64_neither_overflow_nor_vanish(self) -> None:
        for size in (1e-200, 1e200):
            reference = torch.tensor([size, size], dtype=torch.float64)
            stats = error_stats(reference * 1.5, reference)
            assert stats.rmse == pytest.approx(0.5 * size)
            assert stats.rmse_ratio == pytest.approx(0.5)

    def test_tensors_of_different_shapes_or_without_elements_are_refused(self) -> None:
        with pytest.raises(ValueError, match="one shape"):
            error_stats(torch.zeros(2), torch.zeros(1, 2))
        with pytest.raises(ValueError, match="at least one"):
            error_stats(torch.zeros(0), torch.zeros(0))


class TestUlp:
    @given(st.integers(0, 0x7F80), st.integers(0, 0x7F80), st.booleans(), st.booleans())
    @settings(max_examples=300, deadline=None)
    def test_bf16_distance_counts_representable_steps_through_zero(self, i: int, j: int, ni: bool, nj: bool) -> None:
        pair = torch.tensor([i, j], dtype=torch.int16).view(torch.bfloat16)
        a, b = (-pair[0] if ni else pair[0]), (-pair[1] if nj else pair[1])
        assert ulp_distance(a[None], b[None]).item() == abs((-i if ni else i) - (-j if nj else j))

    def test_f32_distance_of_neighbours_is_one(self) -> None:
        x = normal(100).float()
        up = torch.nextafter(x, torch.full_like(x, math.inf))
        assert bool((ulp_distance(up, x, torch.float32) == 1).all())

    def test_a_reference_in_fp64_is_rounded_to_the_format_first(self) -> None:
        x = normal(1000)
        assert bool((ulp_distance(x.bfloat16(), x) == 0).all())

    def test_nan_is_far_from_everything_but_nan_and_zeros_are_equal(self) -> None:
        nan = math.nan
        a, b = torch.tensor([nan, nan, 1.0, 0.0]), torch.tensor([nan, 1.0, nan, -0.0])
        assert ulp_distance(a, b).tolist() == [0, NAN_DISTANCE, NAN_DISTANCE, 0]

    def test_the_histogram_bins_by_powers_of_two_and_counts_nan_apart(self) -> None:
        steps = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8, 100])
        one = torch.ones(10, dtype=torch.bfloat16)
        other = (one[:9].view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)
        histogram = ulp_histogram(torch.cat([other, torch.tensor([math.nan], dtype=torch.bfloat16)]), one)
        assert histogram.counts == (2, 1, 2, 2, 1, 0, 0, 1)
        assert histogram.nan == 1
        assert histogram.largest == 127
        assert str(histogram) == "0: 2, 1: 1, 2-3: 2, 4-7: 2, 8-15: 1, 64-127: 1, NaN: 1"

    def test_a_format_without_a_distance_is_refused(self) -> None:
        with pytest.raises(TypeError, match="float16"):
            ulp_distance(torch.ones(1), torch.ones(1), torch.float16)


class TestHash:
    def test_it_is_sha256_of_dtype_shape_and_row_major_bytes(self) -> None:
        x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
        expected = hashlib.sha256(b"torch.bfloat16 (1, 2) " + bytes([0x80, 0x3F, 0x00, 0x40])).hexdigest()
        assert tensor_hash(x) == expected

    def test_one_bit_the_dtype_or_the_shape_changes_it_and_strides_do_not(self) -> None:
        x = normal(3, 4).float()
        flipped = x.clone()
        flipped.view(torch.int32)[1, 2] ^= 1
        hashes = {tensor_hash(t) for t in (x, flipped, x.view(torch.int32), x.view(4, 3), x.double(), -x)}
        assert len(hashes) == 6
        assert tensor_hash(x.T.contiguous().T) == tensor_hash(x)
        assert tensor_hash(torch.tensor(0.0)) != tensor_hash(torch.tensor(-0.0))
