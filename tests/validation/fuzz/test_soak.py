"""Soak: canaries keep their bits on a healthy engine, and lose them on one where load leaves something behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from small_k3 import small_target

from validation.cli.app import main
from validation.faults.catalogue import FAULTS
from validation.soak.soak import MAX_CONTEXT, Soaked, difference, soak
from validation.targets.base import ArmConfig
from validation.targets.text import Answer

ANSWER = Answer((5, 6), "length", "", (0.5, float("nan")), (), {64: 1.5})


def soaked(rounds: int, *faults: str) -> Soaked:
    config = ArmConfig("candidate", "latency_specialized", "fp8", max_batch=4, max_context=MAX_CONTEXT)
    arm = small_target().open(replace(config, faults=tuple(FAULTS[name] for name in faults)))
    rounds_left = count(rounds, -1)
    return soak(small_target(), arm, 0, lambda: next(rounds_left) > 0)


def test_canaries_of_a_healthy_engine_keep_their_bits() -> None:
    seen = soaked(2)
    assert (seen.rounds, seen.compared, seen.changed, seen.errors) == (2, 8, [], 0)
    assert "0 of 8 canaries changed" in seen.summary()
    assert "at most 0.38" in seen.summary()


@pytest.mark.parametrize("fault", ["state-not-reset", "long-nan-in-one-slot"])
def test_what_load_leaves_behind_changes_a_canary(fault: str) -> None:
    assert soaked(2, fault).failed


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (ANSWER, ""),
        (replace(ANSWER, tokens=(5, 7)), "token 1 is 7, it was 6"),
        (replace(ANSWER, tokens=(5,)), "1 tokens (length), there were 2 (length)"),
        (replace(ANSWER, finish="error"), "2 tokens (error)"),
        (replace(ANSWER, entropies=(0.5000000001, float("nan"))), "logits of other bits"),
        (replace(ANSWER, state_norms={64: 1.25}), "another norm"),
    ],
)
def test_the_difference_of_two_answers_is_named(again: Answer, message: str) -> None:
    said = difference(ANSWER, again)
    assert message in said
    assert bool(said) == bool(message)


def test_a_soak_of_no_time_or_of_an_unknown_fault_is_refused(capsys: Any) -> None:
    assert main(["soak", "--minutes", "0"]) == 2
    assert main(["soak", "--fault", "no-such-fault"]) == 2
    assert "no-such-fault" in capsys.readouterr().err
