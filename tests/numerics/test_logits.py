"""Promises of `numerics.logits`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numerics.logits import (
    LogitStats,
    centred_logit_rms,
    kl_divergence,
    top1_flipped,
    top1_margin,
    topk_overlap,
)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(reference: Tensor, candidate: Tensor, batches: int = 1, top_k: int = 10) -> LogitStats:
    stats = LogitStats(top_k)
    for r, c in zip(reference.chunk(batches), candidate.chunk(batches), strict=True):
        stats.add(r, c)
    return stats


class TestFigures:
    def test_kl_matches_the_textbook_sum_over_probabilities(self) -> None:
        p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
        expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
        assert kl_divergence(p.log() + 3, q.log() - 7).item() == pytest.approx(expected, rel=1e-6)

    def test_kl_of_a_small_change_is_half_its_variance_under_p(self) -> None:
        logits, delta = normal(4, 1000), 1e-4 * normal(4, 1000, seed=1)
        p = logits.softmax(-1)
        variance = (p * delta**2).sum(-1) - (p * delta).sum(-1) ** 2
        # The next term of the expansion is smaller by the size of delta, 1e-4, times a few of its standard deviations.
        assert torch.allclose(kl_divergence(logits, logits + delta), variance / 2, rtol=1e-3)

    def test_kl_is_zero_for_equal_and_for_shifted_logits_and_finite_for_far_ones(self) -> None:
        logits = normal(3, 50, std=5)
        assert bool((kl_divergence(logits, logits) == 0).all())
        assert bool((kl_divergence(logits, logits + 100) < 1e-12).all())
        far = kl_divergence(torch.tensor([[2000.0, 0.0]]), torch.tensor([[0.0, 2000.0]]))
        assert far.item() == pytest.approx(2000)

    def test_a_broken_candidate_row_is_infinitely_far_and_a_broken_reference_row_is_not_judged(self) -> None:
        reference, candidate = normal(3, 10), normal(3, 10)
        candidate[1, 4] = math.nan
        reference[2, 4] = math.inf
        for figure in (kl_divergence, centred_logit_rms):
            values = figure(reference, candidate)
            assert values[0].item() == 0.0
            assert values[1].item() == math.inf
            assert values[2].isnan()

    def test_margin_flip_overlap_and_centred_rms_of_a_worked_example(self) -> None:
        reference = torch.tensor([[5.0, 4.0, 3.0, 0.0], [2.0, 2.0, 1.0, 0.0]])
        candidate = torch.tensor([[4.0, 5.0, 3.0, 2.0], [3.0, 3.0, 2.0, 1.0]])
        assert top1_margin(reference).tolist() == [1.0, 0.0]
        assert top1_flipped(reference, candidate).tolist() == [True, False]
        assert topk_overlap(reference, candidate, 1).tolist() == [0.0, 1.0]
        assert topk_overlap(reference, candidate, 3).tolist() == [1.0, 1.0]
        # Differences (-1, 1, 0, 2) around their mean 1/2; the second row is a pure shift.
        assert centred_logit_rms(reference, candidate).tolist() == pytest.approx([math.sqrt(5 / 4), 0.0])


class TestLogitStats:
    def test_it_equals_the_figures_of_all_rows_at_once_however_they_were_batched(self) -> None:
        reference = normal(200, 64, std=3)
        candidate = reference + normal(200, 64, seed=1, std=0.2)
        summary = filled(reference, candidate, batches=7).summary()
        kl = kl_divergence(reference, candidate)
        reverse = kl_divergence(candidate, reference)
        assert summary.tokens == summary.judged == 200
        assert summary.kl.mean == pytest.approx(float(kl.mean()))
        assert summary.kl.max == pytest.approx(float(kl.max()))
        assert summary.kl.p50 == pytest.approx(float(kl.quantile(0.5, interpolation="higher")))
        assert summary.kl.p99 == pytest.approx(float(kl.quantile(0.99, interpolation="higher")))
        assert summary.reverse_kl.mean == pytest.approx(float(reverse.mean()))
        assert summary.reverse_kl.mean != pytest.approx(summary.kl.mean, rel=1e-6)
        assert summary.overlap == pytest.approx(float(topk_overlap(reference, candidate, 10).mean()))

    def test_flips_fall_into_the_bin_of_the_reference_margin(self) -> None:
        margins = torch.tensor([0.0, 0.1, 0.125, 0.3, 3.0, 5.0])
        reference = torch.stack([torch.tensor([10.0, 10.0 - m, 0.0]) for m in margins.tolist()])
        candidate = reference.clone()
        candidate[[1, 4], 1] = 11.0
        summary = filled(reference, candidate, top_k=2).summary()
        assert [(b.tokens, b.flips) for b in summary.flips] == [(2, 1), (1, 0), (1, 0), (0, 0), (0, 0), (1, 1), (1, 0)]
        assert [b.low for b in summary.flips] == [0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
        assert summary.flip_rate == pytest.approx(2 / 6)

    def test_one_nan_token_in_the_candidate_cannot_hide_in_an_average(self) -> None:
        reference = normal(1000, 16)
        candidate = reference.clone()
        candidate[500, 3] = math.nan
        summary = filled(reference, candidate, batches=3).summary()
        assert summary.candidate_nonfinite == 1
        assert summary.judged == 1000
        assert summary.kl.mean == summary.kl.max == summary.reverse_kl.max == summary.logit_rms.max == math.inf
        assert summary.kl.p50 == 0.0
        assert sum(b.flips for b in summary.flips) == 1
        assert summary.overlap == pytest.approx(0.999)

    def test_tokens_with_a_broken_reference_are_counted_and_leave_the_rest_as_it_is(self) -> None:
        reference, candidate = normal(10, 16), normal(10, 16, seed=1)
        without = filled(reference[1:], candidate[1:]).summary()
        reference[0, 0] = math.nan
        summary = filled(reference, candidate).summary()
        assert (summary.tokens, summary.judged, summary.reference_nonfinite) == (10, 9, 1)
        assert summary.kl == without.kl
        assert summary.overlap == without.overlap

    def test_tokens_stay_in_order_for_a_bootstrap_and_merging_appends(self) -> None:
        reference, candidate = normal(70, 16), normal(70, 16, seed=1)
        first, second = filled(reference[:40], candidate[:40]), filled(reference[40:], candidate[40:])
        first.merge(second)
        expected = filled(reference, candidate)
        assert torch.allclose(first.per_token()["kl"], kl_divergence(reference, candidate))
        assert first.summary() == expected.summary()

    def test_memory_is_three_scalars_per_token(self) -> None:
        stats = filled(normal(64, 512), normal(64, 512, seed=1))
        assert sum(t.untyped_storage().nbytes() for t in stats._scalars) == 3 * 64 * 8

    def test_misuse_is_refused(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            LogitStats().add(normal(2, 18), normal(2, 19))
        with pytest.raises(ValueError, match="top-10"):
            LogitStats().add(normal(2, 8), normal(2, 8))
        with pytest.raises(ValueError, match="nothing to judge"):
            filled(torch.full((2, 20), math.nan), normal(2, 20)).summary()
        with pytest.raises(ValueError, match="rise"):
            LogitStats(margin_edges=(1.0, 0.5))
        with pytest.raises(ValueError, match="same top_k"):
            LogitStats(top_k=5).merge(LogitStats(top_k=6))
