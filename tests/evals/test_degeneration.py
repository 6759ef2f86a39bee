"""Degeneration measures: a loop is found where it begins, and ordinary repetition is no loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.degeneration import LEAST_LOOP, LEAST_REPEATS, LONGEST_PERIOD, compression_ratio, loop_onset, repeated_share
from evals.items import chain
from evals.text import load


@pytest.mark.parametrize("period", [1, 2, 7, 30, LONGEST_PERIOD])
@pytest.mark.parametrize("before", [0, 5, 200])
def test_a_loop_is_found_where_it_begins(period: int, before: int) -> None:
    loop = [1000 + i for i in range(period)] * (LEAST_REPEATS * max(1, LEAST_LOOP // period))
    assert loop_onset([*range(before), *loop, *loop[: period // 2]]) == before


@pytest.mark.parametrize("tail", [[7], [7, 8, 9]])
def test_a_loop_that_ended_is_no_loop(tail: list[int]) -> None:
    assert loop_onset([1, 2, 3] * 40 + tail) is None


def test_too_few_repeats_are_no_loop() -> None:
    assert loop_onset(list(range(40)) * (LEAST_REPEATS - 1)) is None
    assert loop_onset([5] * (LEAST_LOOP - 1)) is None
    assert loop_onset([]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 20), st.integers(0, 10))
def test_a_looped_list_always_loops(before: list[int], period: int, cut: int) -> None:
    loop = list(range(10, 10 + period)) * (LEAST_REPEATS + LEAST_LOOP + 10)
    onset = loop_onset([*before, *loop[: len(loop) - cut]])
    assert onset is not None
    assert onset <= len(before)


def test_long_chains_and_prose_do_not_loop() -> None:
    target = chain.item("eval", 0, 250).target
    assert loop_onset(list(target.encode())) is None
    for document in load("heldout"):
        assert loop_onset(list(document.text.encode())) is None


def test_repetition_and_compression_rise_with_repeating() -> None:
    text = load("heldout")[0].text.encode()[:2000]
    again = text[:200] * 10
    assert repeated_share(list(text)) < 0.2 < 0.8 < repeated_share(list(again))
    assert compression_ratio(text) < 3 < 8 < compression_ratio(again)
    assert repeated_share([1, 2]) == 0
    assert compression_ratio(b"") == 1
