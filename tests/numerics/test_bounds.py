"""Promises of `numerics.bounds`."""

from __future__ import annotations

import math

import pytest
import torch

from numerics.bounds import BF16, E4M3, F32, FloatFormat, accept, dot_product_bound, gamma, judge, output_floor
from numerics.formats import bf16, e4m3_decode, e4m3_encode
from numerics.metrics import error_stats


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestFloor:
    @pytest.mark.parametrize(
        ("fmt", "dtype"), [(BF16, torch.bfloat16), (F32, torch.float32)], ids=lambda p: getattr(p, "name", "")
    )
    def test_ulp_is_the_gap_to_the_next_value_at_every_magnitude(self, fmt: FloatFormat, dtype: torch.dtype) -> None:
        exponents = torch.arange(-140 if dtype is torch.float32 else -130, 127)
        x = torch.exp2(exponents.double()).to(dtype)
        gap = torch.nextafter(x, torch.full_like(x, math.inf)).double() - x.double()
        assert torch.equal(fmt.ulp(x), gap)
        assert torch.equal(fmt.ulp(-1.5 * x.double()), fmt.ulp(1.5 * x.double()))
        assert fmt.ulp(torch.zeros(1)).item() == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps

    def test_e4m3_ulp_matches_its_codes(self) -> None:
        values = e4m3_decode(torch.arange(127, dtype=torch.uint8), torch.float64)
        assert torch.equal(E4M3.ulp(values[:-1]), values.diff())

    def test_the_floor_is_the_error_that_rounding_makes(self) -> None:
        x = 3 * normal(200_000)
        floor, stats = output_floor(x, BF16), error_stats(bf16(x), x)
        assert stats.rmse == pytest.approx(floor.rms, rel=0.02)
        assert 0.9 * floor.max < stats.max_abs <= floor.max

    def test_the_floor_of_a_scaled_fp8_output_is_in_the_output_unit(self) -> None:
        x, scale = 3 * normal(200_000), 0.7
        stats = error_stats(e4m3_decode(e4m3_encode(x / scale), torch.float64) * scale, x)
        floor = output_floor(x, E4M3, scale)
        assert stats.rmse == pytest.approx(floor.rms, rel=0.02)
        assert stats.max_abs <= floor.max * (1 + 1e-12)

    def test_a_nonfinite_reference_has_no_floor(self) -> None:
        with pytest.raises(ValueError, match="finite"):
            output_floor(torch.tensor([1.0, math.nan]), BF16)


class TestDotProduct:
    def test_gamma_is_n_u_to_first_order_and_ends_where_n_u_reaches_one(self) -> None:
        assert gamma(1000, F32.unit_roundoff) == pytest.approx(1000 * 2**-24, rel=1e-4)
        assert gamma(128, BF16.unit_roundoff) == 1.0
        with pytest.raises(ValueError, match="no error bound"):
            gamma(256, BF16.unit_roundoff)

    def test_fp32_sums_in_any_order_stay_inside_the_bound_and_bf16_sums_leave_it(self) -> None:
        x, y = normal(50, 512).float(), normal(50, 512, seed=1).float()
        exact = (x.double() * y.double()).sum(-1)
        bound = dot_product_bound(x, y)
        for order in (torch.arange(512), torch.arange(511, -1, -1), torch.randperm(512)):
            products = (x * y)[:, order]
            total = products[:, 0]
            coarse = bf16(total)
            for j in range(1, 512):
                total = total + products[:, j]
                coarse = bf16(coarse.float() + products[:, j])
            assert bool(((total.double() - exact).abs() <= bound).all())
            assert bool(((coarse.double() - exact).abs() > bound).any())


class TestAcceptance:
    def test_twice_the_baseline_plus_the_floor_passes_and_a_little_more_fails(self) -> None:
        assert accept(measured=2.5, baseline=1.0, floor=0.5)
        verdict = accept(measured=2.75, baseline=1.0, floor=0.5)
        assert not verdict
        assert verdict.allowed == 2.5
        assert verdict.ratio == pytest.approx(1.1)

    def test_the_required_multiple_is_the_one_that_would_just_pass(self) -> None:
        verdict = accept(measured=2.75, baseline=1.0, floor=0.5)
        assert verdict.required_multiple == 2.25
        assert accept(2.75, 1.0, 0.5, multiple=verdict.required_multiple)
        assert not accept(2.75, 1.0, 0.5, multiple=verdict.required_multiple - 1e-9)
        assert "2.25" in str(verdict)
        assert accept(0.4, 1.0, 0.5).required_multiple == 0.0

    def test_an_exact_baseline_leaves_the_floor_alone(self) -> None:
        assert accept(0.5, 0.0, 0.5)
        assert not accept(0.6, 0.0, 0.5)
        assert accept(0.6, 0.0, 0.5).required_multiple == math.inf
        assert accept(0.0, 0.0, 0.0)
        assert accept(0.0, 0.0, 0.0).ratio == 0.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_nonfinite_error_on_either_side_is_refused(self, bad: float) -> None:
        assert not accept(bad, 1.0, 0.5)
        assert not accept(1.0, bad, 0.5)
        assert not accept(bad, bad, 0.5)
        assert accept(bad, 1.0, 0.5).required_multiple == math.inf

    def test_a_tensor_is_judged_on_both_rmse_and_maximum(self) -> None:
        reference = normal(4000)
        baseline = error_stats(bf16(reference), reference)
        floor = output_floor(reference, BF16)
        assert judge(baseline, baseline, floor)
        spike = bf16(reference).clone()
        spike[7] += 0.25
        verdict = judge(error_stats(spike, reference), baseline, floor)
        assert not verdict.max
        assert not verdict
        coarse = error_stats((reference * 32).round() / 32, reference)
        verdict = judge(coarse, baseline, floor)
        assert verdict.max
        assert not verdict.rmse
        assert not verdict

    def test_a_nan_in_the_candidate_or_the_baseline_is_refused(self) -> None:
        reference = normal(100)
        good = error_stats(bf16(reference), reference)
        broken = bf16(reference).clone()
        broken[0] = math.nan
        bad = error_stats(broken, reference)
        assert not judge(bad, good, output_floor(reference, BF16))
        assert not judge(good, bad, output_floor(reference, BF16))
