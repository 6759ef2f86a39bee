"""`bisect layers` and `bisect tokens` name the place of a fault, keep its tensors, and hold nothing else."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from four_layers import CELL, candidate, four_layers, write_four_layers
from safetensors.torch import load_file

from validation.bisect.localise import Errors, Located, boundary_tensors, locate, measure
from validation.bisect.question import Cell, ParityQuestion
from validation.cli.app import main
from validation.faults.base import Fault, Ops, in_layer
from validation.gates.parity.judge import CACHE_MULTIPLE
from validation.mutation.shared import SharedTarget
from validation.targets.base import Arm, ArmConfig, ForcedStep, Target
from validation.verdict import Verdict

LONG = Cell("fp8-tp1-b8", sequences=8, prompt=8, decode=4)

CASES = (
    ("attn-res-out-norm-dropped@0", "layer.0.attention_in", 8),
    ("kda-conv-reversed@2", "layer.2.mlp_in", 8),
    ("mla-scale-null@1", "layer.1.mlp_in", 8),
    ("mla-gate-dropped@3", "layer.3.mlp_in", 8),
    ("reduce-stale-rank@1", "layer.1.mlp_in", 8),
    ("moe-gate-up-swapped@2", "layer.2.mlp_out", 8),
    ("moe-nibbles-swapped@3", "layer.3.mlp_out", 8),
    ("reduce-stale-slice@0", "layer.0.mlp_out", 8),
    ("attn-res-tap-prefix@4", "head.in", 8),
    # The state of one step is read in the next.
    ("kda-conv-not-written@2", "layer.2.mlp_in", 9),
)
"""Fault, the boundary behind its op, and the position at which it shows first; 8 is the first that is decoded."""


@cache
def shared() -> Target:
    """The four layers, whose baseline and floor decode once for all of these tests."""
    return cast(Target, SharedTarget(four_layers()))


def question_of(config: ArmConfig, cell: Cell = LONG, target: Target | None = None) -> ParityQuestion:
    return ParityQuestion(target or shared(), ArmConfig("baseline"), config, cell, seed=1)


@cache
def located(fault: str) -> Located:
    return locate(measure(question_of(candidate(fault))), seed=0)


@pytest.mark.parametrize(("fault", "boundary", "position"), CASES, ids=[fault for fault, _, _ in CASES])
def test_layers_and_tokens_name_the_place_of_a_fault(fault: str, boundary: str, position: int) -> None:
    found = located(fault)
    assert found.verdict is Verdict.FAIL
    assert found.layer is not None
    assert found.token is not None
    assert (found.layer.boundary, found.token.boundary) == (boundary, boundary)
    assert (found.layer.position, found.token.position) == (position, position)
    assert found.layer.ratio.lower > CACHE_MULTIPLE


def test_a_fault_of_the_output_projection_is_named_at_the_logits() -> None:
    found = located("projection-half-written@4")
    assert found.layer is not None
    assert found.layer.boundary == "head.logits"


def test_a_fault_that_begins_late_is_named_at_its_token() -> None:
    def late(ops: Ops) -> Ops:
        calls = iter(range(10**6))

        def wrong_from_the_third(**arguments: Any) -> Any:
            right = ops["moe_tail"](**arguments)
            return right if next(calls) < 2 else right * 2

        return {"moe_tail": wrong_from_the_third}

    fault = in_layer(Fault("late", "", "moe_tail", (), ("specialized",), late), 3)
    found = locate(measure(question_of(replace(candidate(), faults=(fault,)))), seed=0)
    assert found.token is not None
    assert (found.token.boundary, found.token.position) == ("layer.3.mlp_out", LONG.prompt + 2)


def test_a_healthy_candidate_leaves_the_floor_nowhere() -> None:
    found = locate(measure(question_of(candidate())), seed=0)
    assert (found.layer, found.token) == (None, None)
    assert found.verdict is Verdict.PASS


def errors(candidate_error: float, noise: float, *, tokens: int = 3) -> Errors:
    chance = torch.Generator().manual_seed(0)
    floor = torch.full((2, tokens, 8), 0.01, dtype=torch.float64)
    spread = torch.exp(noise * torch.randn(2, tokens, 8, generator=chance, dtype=torch.float64))
    return Errors(["layer.0.mlp_in", "head.logits"], 5, floor * candidate_error * spread, floor)


def test_what_is_neither_shown_to_be_out_nor_within_is_inconclusive() -> None:
    assert locate(errors(1.0, 0.01), 0).verdict is Verdict.PASS
    assert locate(errors(1.5, 1.0), 0).verdict is Verdict.INCONCLUSIVE
    assert locate(errors(9.0, 0.1), 0).verdict is Verdict.FAIL


def test_an_error_of_a_single_token_is_found_though_its_mean_over_tokens_is_within() -> None:
    measured = errors(1.0, 0.01, tokens=12)
    measured.candidate[1, 7] = 0.2
    found = locate(measured, 0)
    assert found.layer == found.token
    assert found.token is not None
    assert (found.token.boundary, found.token.position) == ("head.logits", 12)
    assert found.over_tokens["head.logits"].lower < CACHE_MULTIPLE


def test_nan_is_far_out() -> None:
    def broken(ops: Ops) -> Ops:
        return {"moe_tail": lambda **arguments: ops["moe_tail"](**arguments) * math.nan}

    fault = in_layer(Fault("nan", "", "moe_tail", (), ("specialized",), broken), 3)
    found = locate(measure(question_of(replace(candidate(), faults=(fault,)), CELL)), seed=0)
    assert found.layer is not None
    assert found.layer.boundary == "layer.3.mlp_out"


def test_the_tensors_kept_are_those_of_the_place_that_was_found() -> None:
    question, place = question_of(candidate("moe-gate-up-swapped@2")), located("moe-gate-up-swapped@2").layer
    assert place is not None
    kept = boundary_tensors(question, replace(place, position=LONG.prompt + 1))
    names = {f"{arm}.layer.2.{part}" for arm in ("baseline", "candidate", "floor") for part in ("mlp_in", "mlp_out")}
    assert kept.keys() == names | {"tokens"}
    hidden = four_layers().dims()["hidden_size"]
    assert {tuple(kept[name].shape) for name in names} == {(8, hidden)}
    assert kept["tokens"].tolist() == [text[: LONG.prompt + 2] for text in question.sequences(8)]
    apart = {
        part: float((kept[f"candidate.layer.2.{part}"] - kept[f"baseline.layer.2.{part}"]).norm())
        for part in ("mlp_in", "mlp_out")
    }
    assert apart["mlp_out"] > 10 * apart["mlp_in"]


class Counting:
    """A target whose steps are counted while somebody holds them."""

    def __init__(self) -> None:
        self.alive, self.most = weakref.WeakSet[ForcedStep](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(four_layers(), name)

    def open(self, config: ArmConfig) -> Arm:
        arm = four_layers().open(config)
        decode = arm.forced_decode

        def counted(texts: Sequence[Sequence[int]], prompt_length: int) -> Any:
            return CountedDecode(decode(texts, prompt_length), self)

        arm.forced_decode = counted  # type: ignore[method-assign, assignment]
        return arm


class CountedDecode:
    def __init__(self, decode: Any, counting: Counting) -> None:
        self._decode, self._counting = decode, counting
        self.close = decode.close

    def __iter__(self) -> Iterator[ForcedStep]:
        for step in self._decode:
            self._counting.alive.add(step)
            self._counting.most = max(self._counting.most, len(self._counting.alive))
            yield step
            del step


def most_steps_held(decode: int) -> int:
    counting = Counting()
    cell = Cell("fp8-tp1-b4", sequences=4, prompt=4, decode=decode)
    question = question_of(candidate("kda-conv-reversed@2"), cell, cast(Target, counting))
    found = locate(measure(question), seed=0)
    assert found.layer is not None
    boundary_tensors(question, found.layer)
    return counting.most


def test_memory_does_not_grow_with_the_tokens() -> None:
    # Baseline, candidate and the two halves of the floor: the steps at hand, and those before while they are made.
    assert 4 <= most_steps_held(3) == most_steps_held(8) < 3 * 4


@pytest.mark.parametrize("by", ["layers", "tokens"])
def test_the_command_names_the_place_and_leaves_its_files(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bisect", by, "--model", str(write_four_layers(tmp_path / "model")), "--out", str(tmp_path / "runs")]
    words += ["--cell", "fp8-tp1-b4", "--prompt", "8", "--decode", "4", "--seed", "1"]
    assert main([*words, "--fault", "moe-gate-up-swapped@2"]) == 1
    said = capsys.readouterr().out
    assert "layer 2, behind the MLP (layer.2.mlp_out)" in said
    assert "position 8" in said
    [file] = (tmp_path / "runs").glob(f"*/{by}.json")
    document = json.loads(file.read_bytes())
    assert (document["found"]["boundary"], document["found"]["position"]) == ("layer.2.mlp_out", 8)
    assert "candidate.layer.2.mlp_out" in load_file(file.with_name("boundary.safetensors"))
    again = document["command"]
    assert main([*again[1:], "--out", str(tmp_path / "again")]) == 1
    [twin] = (tmp_path / "again").glob(f"*/{by}.json")
    assert json.loads(twin.read_bytes())["found"] == document["found"]


def test_the_command_says_that_there_is_nothing_to_bisect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bisect", "layers", "--model", str(write_four_layers(tmp_path / "model")), "--out", str(tmp_path / "runs")]
    assert main([*words, "--cell", "fp8-tp1-b4", "--prompt", "8", "--decode", "6", "--seed", "1"]) == 0
    assert "PASS: nothing to bisect" in capsys.readouterr().out
    assert not list(tmp_path.glob("runs/*/boundary.safetensors"))
