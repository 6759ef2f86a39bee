"""Tensor parallelism: any number of ranks gives the answer of one, and sums are added in the documented order."""

from __future__ import annotations

import itertools
import math
from functools import cache, reduce

import numpy as np
import pytest
import torch
from small_models import SMALL, HandDriven, prompt_of, relative_rms, rounding_noise, runner_of, weights_of
from torch import Tensor

from decode_impl.generic import OPS as GENERIC_OPS
from decode_impl.parallel.reduce import grouped_sum, sequential_sum
from decode_impl.parallel.shard import share
from decode_impl.specialized.emulation import OPS as SPECIALIZED_OPS

RANKS = (2, 4, 8, 16)


@cache
def run(backend: str, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    request = HandDriven(runner_of(decode_backend=backend, tensor_parallel=ranks), prompt_of(28))
    return request.run(20, *[1] * 8), request.caches()


def noise() -> float:
    # Partial sums are rounded before they are added: in quadrature about one rounding more for each of a layer's three
    # reductions, which the count of roundings of one rank does not have.
    return math.hypot(rounding_noise(SMALL), rounding_noise(SMALL) * (3 / 24) ** 0.5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_logits_of_many_ranks_agree_with_one_within_the_roundings_of_the_reductions(backend: str, ranks: int) -> None:
    assert relative_rms(run(backend, ranks)[0], run(backend, 1)[0]) <= noise()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_states_joined_over_ranks_agree_with_those_of_one(backend: str, ranks: int) -> None:
    many, one = run(backend, ranks)[1], run(backend, 1)[1]
    assert relative_rms(many["latent3"], one["latent3"]) <= noise()
    for layer in SMALL.kda_layers:
        parts = [(many.get(f"conv({layer}, {r})"), many.get(f"state({layer}, {r})")) for r in range(ranks)]
        conv = torch.cat([part.unflatten(0, (3, -1)) for part, _ in parts if part is not None], dim=1).flatten(0, 1)
        state = torch.cat([part for _, part in parts if part is not None])
        assert relative_rms(conv, one[f"conv({layer}, 0)"]) <= noise()
        assert relative_rms(state, one[f"state({layer}, 0)"]) <= noise()


def test_the_cases_above_have_ranks_without_heads_and_shares_narrower_than_an_mxfp4_block() -> None:
    weights = weights_of(SMALL, 16)
    assert [part.heads for part in weights.layers[0].attention] == [1, 1] + [0] * 14
    assert [part.heads for part in weights.layers[3].attention] == [1, 1] + [0] * 14
    assert SMALL.moe_intermediate_size // 16 == 4


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_ranks_hold_every_expert_weight_exactly_once(ranks: int) -> None:
    whole, parts = weights_of(SMALL, 1).layers[1].mlp, weights_of(SMALL, ranks).layers[1].mlp
    width = SMALL.moe_intermediate_size // ranks
    gate = torch.cat([w13.dense[:, :width] for w13 in parts.w13], dim=1)
    up = torch.cat([w13.dense[:, width:] for w13 in parts.w13], dim=1)
    assert torch.equal(torch.cat([gate, up], dim=1), whole.w13[0].dense)
    assert torch.equal(torch.cat([w2.dense[..., :width] for w2 in parts.w2], dim=2), whole.w2[0].dense)
    assert all(not w2.dense[..., width:].any() for w2 in parts.w2)


@pytest.mark.parametrize(("total", "ranks"), [(96, 16), (2, 16), (5, 4), (320, 3), (0, 2)])
def test_shares_are_contiguous_cover_everything_and_differ_by_at_most_one(total: int, ranks: int) -> None:
    ranges = [share(total, ranks, rank) for rank in range(ranks)]
    assert [ranges[0][0], ranges[-1][1]] == [0, total]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


# Reduction orders, on values where every order gives other bits.


@cache
def partials(ranks: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(ranks)
    # BF16 partials of magnitudes 2^-20 .. 2^4, so that FP32 sums round at every step.
    values = torch.randn(ranks, 4096, generator=generator)
    return tuple(torch.ldexp(values, torch.randint(-20, 5, values.shape, generator=generator)).bfloat16())


def floats(ranks: int) -> list[np.ndarray]:
    return [partial.float().numpy() for partial in partials(ranks)]


def test_eight_ranks_are_summed_in_pairs_and_the_pairs_in_order() -> None:
    r0, r1, r2, r3, r4, r5, r6, r7 = floats(8)
    documented = (((r0 + r1) + (r2 + r3)) + (r4 + r5)) + (r6 + r7)
    got = grouped_sum(partials(8)).numpy()
    assert np.array_equal(got, documented)
    for other in (
        ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7)),
        (((r0 + r4) + (r1 + r5)) + (r2 + r6)) + (r3 + r7),
        reduce(np.add, floats(8)),
        reduce(np.add, floats(8)[::-1]),
    ):
        assert not np.array_equal(got, other)


def test_one_unit_in_the_last_place_tells_the_grouped_from_the_sequential_order() -> None:
    half = 2.0**-24  # half an ULP of 1: lost when added to 1 alone, kept when two are added first
    values = [torch.tensor([x]) for x in (1.0, 0.0, half, half, 0.0, 0.0, 0.0, 0.0)]
    assert grouped_sum(values).item() == 1.0 + 2 * half
    assert sequential_sum(values).item() == 1.0


def test_sixteen_ranks_are_summed_in_groups_of_four() -> None:
    groups = [reduce(np.add, floats(16)[i : i + 4]) for i in range(0, 16, 4)]
    assert np.array_equal(grouped_sum(partials(16)).numpy(), reduce(np.add, groups))
    assert not np.array_equal(sequential_sum(partials(16)).numpy(), reduce(np.add, groups))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_up_to_four_ranks_both_orders_are_ascending_ranks(ranks: int) -> None:
    ascending = reduce(np.add, floats(ranks))
    assert np.array_equal(grouped_sum(partials(ranks)).numpy(), ascending)
    assert np.array_equal(sequential_sum(partials(ranks)).numpy(), ascending)


@pytest.mark.parametrize(("rows", "order"), [(1, grouped_sum), (32, grouped_sum), (64, sequential_sum)])
def test_the_specialised_all_reduce_is_one_shot_up_to_32_rows_and_two_shot_above(rows: int, order: object) -> None:
    y = [partial.view(64, 64)[:rows] for partial in partials(8)]
    # Cancelling the leading bits makes the order of the FP32 sum visible after the rounding to BF16.
    y = [*y[:6], (-sequential_sum(y[:6])).bfloat16(), y[7]]
    expected = {f: f(y).bfloat16() for f in (grouped_sum, sequential_sum)}
    assert not torch.equal(*expected.values())
    assert torch.equal(SPECIALIZED_OPS["all_reduce"](y=y), expected[order])
    assert torch.equal(GENERIC_OPS["all_reduce"](y=y), expected[sequential_sum])
