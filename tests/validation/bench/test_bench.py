"""The bench: arms in turn on the same inputs, honest labels, failures that are lines, and figures no gate can read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layout import ROOT, imported

from decode_impl import generic
from decode_impl.config import K3_MINI
from decode_impl.model import Step
from decode_impl.specialized import emulation
from decode_impl.specialized.contract import batch_bin
from decode_impl.weights import ModelWeights
from validation.bench import run as bench_run
from validation.bench.arms import StepArm, Tables, tables_on
from validation.bench.ceiling import measure_ceiling
from validation.bench.clock import Clock, Pair, Spread, interleaved
from validation.bench.compiled import compiled_tables
from validation.bench.lines import Line
from validation.bench.report import CPU_CAVEAT, SYNTHETIC_CAVEAT
from validation.bench.serving import ServingBench
from validation.bench.steps import StepBench, committed
from validation.bench.traffic import step_bytes, weight_bytes
from validation.bench.weights import random_weights
from validation.cli.app import main
from validation.errors import UsageError
from validation.reading import read_run_record

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


def command(out: Path, *arguments: str) -> int:
    return main(["bench", "--batch", "1", "--rounds", "1", "--no-serve", *arguments, "--out", str(out)])


def test_a_bench_is_on_disk_with_its_caveats(tmp_path: Path, capsys: Any) -> None:
    assert command(tmp_path, "--drafts", "3") == 0
    data, page = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    assert data["kind"] == "decodegate bench"
    assert data["caveats"] == [CPU_CAVEAT, SYNTHETIC_CAVEAT]
    assert data["implementation"] == "emulation"
    assert data["environment"]["torch"] == torch.__version__
    assert [line["synthetic_acceptance"] for line in data["lines"]] == [False, False, False, True]
    assert all(text in page for text in (CPU_CAVEAT, SYNTHETIC_CAVEAT, "| decode throughput (SYNTHETIC acceptance) |"))
    said = capsys.readouterr().out
    assert CPU_CAVEAT in said
    assert "decode step" in said
    assert command(tmp_path) == 2
    assert "holds a bench already" in capsys.readouterr().err


def test_a_group_that_breaks_is_a_line_and_exit_code_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        yield Line("decode step", 1, 0, "us")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StepBench, "lines", breaks)
    assert command(tmp_path, "--no-drafts") == 4
    (_, line) = json.loads((tmp_path / "bench.json").read_text())["lines"]
    assert line["error"] == "RuntimeError: out of memory"
    assert "NOT MEASURED: RuntimeError: out of memory" in (tmp_path / "bench.md").read_text()


def test_a_budget_that_is_spent_is_exit_code_3_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0, 100)
    monkeypatch.setattr(bench_run, "monotonic", lambda: float(next(ticks)))
    line = Line("decode step", 1, 0, "us", arms={"generic": Spread.of([1.0])})
    monkeypatch.setattr(StepBench, "lines", lambda *_: iter([line, line]))
    assert command(tmp_path, "--no-drafts", "--budget", "250") == 3
    data = json.loads((tmp_path / "bench.json").read_text())
    assert len(data["lines"]) == 1
    assert data["unmeasured"] == ["the rest of decode steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "16"), "--shard needs a CUDA device"),
        (("--layers", "4"), "--layers needs --shard"),
        (("--against-compile",), "--against-compile needs a CUDA device"),
        (("--batch", "65"), "--batch or --serve is [65], allowed are 1 to 64"),
        (("--drafts", "2"), "--drafts is [2], allowed are 3 to 7"),
        (("--drafts", "3", "--no-drafts"), "leave one of the two out"),
        (("--serve", "3"), "leave one of the two out"),
        (("--context", "9000"), "a context of 9000 tokens is given"),
        (("--prompt", "5000"), "--prompt or --output is [5000]"),
        (("--rounds", "0"), "--rounds"),
        (("--budget", "0"), "--budget"),
        (("--out", "/dev/null/x"), "/dev/null"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a CUDA device refuses")
def test_wrong_wishes_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert main(["bench", "--no-serve", "--out", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_figure_of_a_bench_can_enter_a_gate(tmp_path: Path) -> None:
    """Only the command line imports the bench, and its folder is no run that anything else would read."""
    users = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "validation").rglob("*.py")
        if any(name.startswith("validation.bench") for name in imported(path.read_text("utf-8"), "validation"))
    ]
    outside = [path for path in users if not path.startswith("validation/bench/")]
    assert outside == ["validation/cli/bench.py"]
    (tmp_path / "bench.json").write_text('{"kind": "decodegate bench", "lines": []}')
    (tmp_path / "record.json").write_text((tmp_path / "bench.json").read_text())
    with pytest.raises(UsageError):
        read_run_record(tmp_path / "record.json")


def test_a_quotient_of_readings_is_taken_by_rounds() -> None:
    assert Pair.of([1.0, 3.0, 2.0, 2.0], [1.0, 1.0, 4.0, 4.0]).quotients == [2.0, 0.5]
