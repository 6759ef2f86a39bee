"""Sampling: the numbers drawn depend on seed and position alone, and follow the exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from decode_impl.sampling import SamplingError, SamplingParams, sample

ALPHA = 1e-3
"""Chance that a correct sampler would fail a distribution test, had its seed not been fixed."""

PROBABILITIES = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
LOGITS = PROBABILITIES.log().float()


def counts(params: SamplingParams, draws: int = 3000) -> list[int]:
    drawn = torch.tensor([sample(LOGITS, params, position) for position in range(draws)])
    return torch.bincount(drawn, minlength=4).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_softmax(temperature: float) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    observed = counts(SamplingParams(temperature=temperature, seed=11))
    assert chisquare(observed, (expected / expected.sum() * sum(observed)).tolist()).pvalue > ALPHA


def test_seeds_draw_independently_of_each_other() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3000)]
    observed = torch.bincount(torch.tensor([sample(LOGITS, p, 5) for p in params]), minlength=4).tolist()
    assert chisquare(observed, (PROBABILITIES * sum(observed)).tolist()).pvalue > ALPHA


def test_the_distribution_test_has_power() -> None:
    observed = counts(SamplingParams(temperature=1.0, seed=11))
    wrong = (PROBABILITIES + torch.tensor([0.03, -0.03, 0.0, 0.0])) * sum(observed)
    assert chisquare(observed, wrong.tolist()).pvalue < ALPHA


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, [1]), (0.49, [1]), (0.6, [1, 3]), (0.79, [1, 3]), (0.9, [1, 2, 3])])
def test_top_p_keeps_the_token_that_crosses_it_and_no_more(top_p: float, kept: list[int]) -> None:
    observed = counts(SamplingParams(temperature=1.0, top_p=top_p, seed=3), draws=1500)
    assert [token for token, count in enumerate(observed) if count] == kept
    expected = PROBABILITIES[kept] / PROBABILITIES[kept].sum() * sum(observed)
    if len(kept) > 1:
        assert chisquare([observed[token] for token in kept], expected.tolist()).pvalue > ALPHA


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    flat = torch.zeros(320)
    tokens = [[sample(flat, SamplingParams(temperature=1.0, seed=seed), p) for p in range(20)] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    assert sample(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(), 0) == 1
    assert sample(torch.tensor([1.0, 3.0, 3.0, 3.0]), SamplingParams(), 0) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 5e-324])
def test_a_temperature_close_to_zero_is_greedy(temperature: float) -> None:
    logits = torch.tensor([1.0, -2.0, 30.0, 2.0])
    assert all(sample(logits, SamplingParams(temperature=temperature, seed=seed), 0) == 2 for seed in range(20))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(SamplingError, match="position 9 hold NaN or infinity"):
        sample(torch.tensor([0.0, bad, 1.0]), SamplingParams(temperature=temperature), 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(options: dict[str, float], named: str) -> None:
    with pytest.raises(SamplingError, match=f"^{named} is"):
        SamplingParams(**options)
