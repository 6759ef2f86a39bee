"""The bench: arms in turn on the same inputs, honest labels, failures that are lines, and figures no gate can read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from decode_impl import generic
from decode_impl.model import Step
from decode_impl.presets import K3_MINI
from decode_impl.specialized import emulation
from decode_impl.specialized.contract import batch_bin
from decode_impl.weights import ModelWeights
from validation.bench.arms import StepArm, Tables, tables_on
from validation.bench.ceiling import measure_ceiling
from validation.bench.clock import Clock, Pair, Spread, interleaved
from validation.bench.compiled import compiled_tables
from validation.bench.lines import Line
from validation.bench.serving import ServingBench
from validation.bench.steps import StepBench, committed
from validation.bench.traffic import step_bytes, weight_bytes
from validation.bench.weights import random_weights

CPU = torch.device("cpu")
CONTEXT = 70
"""A page and a part of one."""


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return random_weights(replace(K3_MINI, num_hidden_layers=3, full_attention_layers=(1,)), CPU)


def steps(weights: ModelWeights, tables: Tables | None = None) -> StepBench:
    return StepBench(weights, tables or tables_on(CPU), Clock(CPU), 1e9, CONTEXT, rounds=2, seed=0)


def by_name(lines: list[Line]) -> dict[tuple[str, int], Line]:
    return {(line.name, line.requests): line for line in lines}


def test_arms_are_read_in_the_order_a_b_b_a() -> None:
    order: list[str] = []

    def read(call: Any) -> float:
        order.append(call())
        return 1.0

    pair = interleaved(read, lambda: "a", lambda: "b", rounds=2)
    assert order == ["a", "b", "b", "a"] * 2
    assert (len(pair.first), len(pair.second), len(pair.quotients)) == (4, 4, 2)


def test_a_clock_that_drifts_evenly_favours_neither_arm() -> None:
    drift = count(1)
    pair = interleaved(lambda call: float(next(drift)), lambda: None, lambda: None, rounds=5)
    assert pair.quotients == [1.0] * 5


def test_rounds_end_when_the_time_is_spent_but_one_is_always_measured() -> None:
    pair = interleaved(lambda call: 1.0, lambda: None, lambda: None, rounds=9, most_s=0.0)
    assert len(pair.quotients) == 1


@pytest.mark.parametrize("readings", [[], [1.0, float("nan")], [float("inf")]])
def test_a_spread_of_nothing_or_of_no_number_is_refused(readings: list[float]) -> None:
    with pytest.raises(ValueError, match="finite numbers, at least one"):
        Spread.of(readings)


def test_a_spread_tells_median_and_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 100.0]).json() == {"n": 5, "median": 3.0, "q1": 2.0, "q3": 4.0, "iqr": 2.0}


def test_every_decode_line_has_both_arms_their_spread_and_the_limit(weights: ModelWeights) -> None:
    lines = list(steps(weights).lines((1, 2), 0))
    assert [(line.name, line.requests) for line in lines] == [
        (name, requests) for requests in (1, 2) for name in ("decode step", "decode throughput")
    ]
    for line in lines:
        assert list(line.arms) == ["generic", "specialised"]
        assert all(spread.n == 4 for spread in line.arms.values())
        assert line.speedup is not None
        assert line.speedup.n == 2
        assert line.limit is not None
        assert line.limit.least_us == pytest.approx(line.limit.bytes / 1e9 * 1e6)
        assert not line.synthetic
    step, rate = by_name(lines)["decode step", 2], by_name(lines)["decode throughput", 2]
    for arm, spread in step.arms.items():
        assert step.limit is not None
        assert step.limit.share[arm] == pytest.approx(step.limit.least_us / spread.median)
        # The quartiles of 1/x are those of x, turned around; a median of four is a mean of two.
        assert rate.arms[arm].q1 <= 2e6 / spread.median <= rate.arms[arm].q3


@pytest.mark.parametrize("drafts", [3, 5, 7])
def test_what_rests_on_an_assumed_acceptance_says_so(weights: ModelWeights, drafts: int) -> None:
    lines = list(steps(weights).lines((1,), drafts))
    assert [(line.name, line.synthetic) for line in lines] == [("verify step", False), ("decode throughput", True)]
    assert f"SYNTHETIC acceptance: {committed(drafts):g} tokens" in lines[1].note
    assert lines[1].json()["synthetic_acceptance"] is True
    assert committed(7) == 6


def test_batches_that_no_verify_step_holds_are_left_out(weights: ModelWeights) -> None:
    assert list(steps(weights).lines((16, 32), 7)) == []


def test_both_arms_begin_with_the_same_caches_and_compute_the_same_step(weights: ModelWeights) -> None:
    arms = [StepArm(weights, table, CONTEXT, 3, 4, 7) for table in (generic.OPS, emulation.OPS)]
    first, second = (arm.latents.layers for arm in arms)
    assert all(torch.equal(first[layer], second[layer]) for layer in first)
    assert not any(bool(layer[0].any()) for layer in first.values())
    logits = [arm.eager(arm.batch(3, seed=1)).logits for arm in arms]
    assert logits[0].shape == (12, K3_MINI.vocab_size)
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[0].norm()


@pytest.mark.parametrize(("requests", "width"), [(1, 1), (3, 1), (1, 6), (3, 6), (2, 8)])
def test_a_captured_step_is_the_eager_step(weights: ModelWeights, requests: int, width: int) -> None:
    """Captured by something that stands in for a CUDA graph: the shape is its bin's, null requests fill it."""

    def capture(step: Callable[[], Step]) -> tuple[Step, Callable[[], None]]:
        results = step()
        return results, lambda: results.logits.copy_(step().logits)

    eager, replayed = (StepArm(weights, generic.OPS, CONTEXT, requests, width, 0) for _ in range(2))
    replayed.capture([(batch_bin(requests * width), width)], capture)
    batch = eager.batch(requests, seed=1)
    logits = eager.step(batch)().logits
    assert logits.shape[0] == requests * width
    assert torch.equal(replayed.step(batch)().logits, logits)
    with pytest.raises(KeyError, match="no step of shape"):
        replayed.step(StepArm(weights, generic.OPS, CONTEXT, 16, 1, 0).batch(16, seed=1))


def test_an_arm_that_is_slower_is_told_slower(weights: ModelWeights) -> None:
    def lagging(**arguments: Any) -> Any:
        time.sleep(0.05)
        return generic.OPS["route"](**arguments)

    tables = Tables(generic.OPS, {**generic.OPS, "route": lagging}, {})
    (line, _) = steps(weights, tables).lines((1,), 0)
    assert line.speedup is not None
    assert line.speedup.median < 0.7


def test_an_arm_that_computes_no_numbers_gets_no_time(weights: ModelWeights) -> None:
    def broken(**arguments: Any) -> Any:
        return generic.OPS["moe_tail"](**arguments) * float("nan")

    tables = Tables(generic.OPS, {**generic.OPS, "moe_tail": broken}, {})
    (line,) = steps(weights, tables).lines((1,), 0)
    assert "the specialised arm's logits are not finite" in line.error
    assert line.arms == {}


def test_serving_tells_every_wait_apart(weights: ModelWeights) -> None:
    lines = list(ServingBench(weights, tables_on(CPU), prompt=20, output=4, rounds=1, seed=0).lines((2,)))
    names = ["prefill", "time to first token", "request latency", "output throughput"]
    assert [line.name for line in lines] == names
    assert all(spread.n == 2 for line in lines for spread in line.arms.values())
    first, last = lines[1].arms, lines[2].arms
    assert all(first[arm].median < last[arm].median for arm in first)
    assert "prompts run the generic ops in both arms" in lines[0].note


def test_a_step_moves_only_the_experts_that_were_chosen(weights: ModelWeights) -> None:
    config = weights.config
    every = step_bytes(weights, [config.num_experts] * 2, 1, 1, CONTEXT)
    none = step_bytes(weights, [0, 0], 1, 1, CONTEXT)
    experts = [weight_bytes((layer.mlp.w13, layer.mlp.w2)) for layer in weights.layers if hasattr(layer.mlp, "w13")]
    assert every - none == sum(experts)
    assert step_bytes(weights, [0, 0], 1, 1, CONTEXT + 1) - none == config.latent_row


def test_the_ops_for_torch_compile_compute_the_same_step(weights: ModelWeights) -> None:
    tables = (generic.OPS, *compiled_tables(generic.OPS, lambda op: op))
    arms = [StepArm(weights, table, CONTEXT, 2, 1, 3) for table in tables]
    plain, every, most = (arm.eager(arm.batch(2, seed=1)).logits for arm in arms)
    for logits in (every, most):
        assert 0 < (logits - plain).norm() < 0.1 * plain.norm()


def test_the_ceiling_is_the_greater_of_copy_and_read() -> None:
    ceiling = measure_ceiling(Clock(CPU))
    assert ceiling.bytes_per_second == max(ceiling.copy.median, ceiling.read.median) > 0


def test_a_quotient_of_readings_is_taken_by_rounds() -> None:
    assert Pair.of([1.0, 3.0, 2.0, 2.0], [1.0, 1.0, 4.0, 4.0]).quotients == [2.0, 0.5]
