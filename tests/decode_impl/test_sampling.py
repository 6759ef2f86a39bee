"""Sampling: the numbers drawn depend on seed and position alone, and follow the exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from decode_impl.rejection import accept, acceptance_probability, residual
from decode_impl.sampling import SamplingError, SamplingParams, Stream, distribution, draw, sample, uniform

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


# Standard rejection sampling.


def distributions(seed: int, rows: int, vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(rows, vocab, generator=generator, dtype=torch.float64) ** 3
    drawn[torch.rand(rows, vocab, generator=generator) < 0.2] = 0.0  # top-p leaves zeros
    drawn[:, 0] += 0.05
    return list(drawn / drawn.sum(-1, keepdim=True))


def committed_block(
    p: list[torch.Tensor], q: list[torch.Tensor], verified_with: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Exact distribution of the first len(q) + 1 tokens that verify steps commit, f64 [V, V, ..].

    Every draft tuple and every outcome is enumerated; after a rejection the rest follows the target, as it does when
    the next step begins there.
    """
    depth, vocab = len(q), len(p[0])
    rule = verified_with or q
    joint = torch.zeros([vocab] * (depth + 1), dtype=torch.float64)

    def target_tail(prefix: tuple[int, ...], chance: float) -> None:
        if len(prefix) == depth + 1:
            joint[prefix] += chance
            return
        for token, probability in enumerate(p[len(prefix)].tolist()):
            if probability:
                target_tail((*prefix, token), chance * probability)

    def step(prefix: tuple[int, ...], chance: float) -> None:
        row = len(prefix)
        if row == depth:
            target_tail(prefix, chance)
            return
        for draft, drafted in enumerate(q[row].tolist()):
            if not drafted:
                continue
            accepted = acceptance_probability(p[row], rule[row], draft)
            if accepted:
                step((*prefix, draft), chance * drafted * accepted)
            for token, replaced in enumerate(residual(p[row], rule[row]).tolist()):
                if replaced and accepted < 1:
                    target_tail((*prefix, token), chance * drafted * (1 - accepted) * replaced)

    step((), 1.0)
    return joint


def independent_joint(p: list[torch.Tensor]) -> torch.Tensor:
    joint = p[0]
    for row in p[1:]:
        joint = joint[..., None] * row
    return joint


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_committed_tokens_follow_the_target_exactly_whatever_the_drafter(seed: int, vocab: int, depth: int) -> None:
    p, q = distributions(seed, depth + 1, vocab), distributions(seed + 100, depth, vocab)
    assert (committed_block(p, q) - independent_joint(p)).abs().max() < 1e-15 * 64


def test_a_certain_drafter_is_verified_exactly_too() -> None:
    p = distributions(1, 4, 5)
    q = [torch.nn.functional.one_hot(torch.tensor(i), 5).double() for i in (2, 0, 4)]
    assert (committed_block(p, q) - independent_joint(p)).abs().max() < 1e-15 * 64


def test_another_q_than_the_drafts_were_drawn_from_is_biased_even_where_more_is_accepted() -> None:
    p, q = distributions(3, 3, 5), distributions(103, 2, 5)
    flat = [row**0.7 / (row**0.7).sum() for row in q]
    wrong = committed_block(p, q, verified_with=flat)
    assert wrong.sum() == pytest.approx(1)
    assert (wrong - independent_joint(p)).abs().sum() / 2 > 0.01  # total variation


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_accept_draws_what_the_rule_says(temperature: float) -> None:
    p, q = PROBABILITIES, torch.tensor([0.4, 0.2, 0.4, 0.0], dtype=torch.float64)
    params = SamplingParams(temperature=temperature, seed=5)
    tokens = []
    for position in range(4000):
        draft = draw(q, uniform(params.seed, position, Stream.DRAFT))
        numbers = uniform(params.seed, position, Stream.ACCEPT), uniform(params.seed, position, Stream.RESIDUAL)
        token, accepted = accept(p, q, draft, *numbers)
        assert accepted == (token == draft)
        tokens.append(token)
    observed = torch.bincount(torch.tensor(tokens), minlength=4)
    assert chisquare(observed.tolist(), (p * len(tokens)).tolist()).pvalue > ALPHA


def test_numbers_of_different_streams_and_positions_are_independent() -> None:
    streams = torch.tensor([[uniform(3, position, stream) for position in range(2000)] for stream in Stream])
    correlations = torch.corrcoef(torch.cat([streams, streams.roll(1, 1)]))
    off = correlations[~torch.eye(len(correlations), dtype=torch.bool)].abs().max()
    assert off < 4.5 / 2000**0.5  # of 28 pairs the largest exceeds 4.5 sigma in 2 of 10,000 studies


def test_the_distribution_that_drafts_are_verified_with_is_the_one_that_sample_draws_from() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=2)
    expected = distribution(LOGITS, params, 0)
    observed = torch.tensor([sample(LOGITS, params, position) for position in range(3000)]).bincount(minlength=4)
    kept = expected.nonzero().squeeze(-1)
    assert observed[expected == 0].sum() == 0
    assert chisquare(observed[kept].tolist(), (expected[kept] * 3000).tolist()).pvalue > ALPHA
    greedy = distribution(LOGITS, SamplingParams(), 0)
    assert greedy.tolist() == [0, 1, 0, 0]


def test_a_draw_never_takes_a_token_of_probability_zero() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert {draw(p, number) for number in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53)} == {1, 3}
