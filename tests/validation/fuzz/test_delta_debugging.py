"""Delta debugging finds the part of a failing list that fails by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import pytest

from validation.delta_debugging import Asked, failing_sets, most_runs_of_single, smallest_part
from validation.verdict import Verdict


def asked(n: int, fails: Callable[[Collection[int]], bool], most: int = 1000) -> Asked[int]:
    """Elements 0 to n - 1, of which a part fails as `fails` says."""
    return Asked(range(n), lambda kept: Verdict.FAIL if fails(kept) else Verdict.PASS, most)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 76])
def test_one_culprit_wherever_it_is_costs_at_most_two_runs_a_halving(n: int) -> None:
    for culprit in range(n):
        search = asked(n, lambda kept, culprit=culprit: culprit in kept)
        assert failing_sets(search) == ([[culprit]], True)
        assert len(search.answers) <= most_runs_of_single(n)


def test_two_that_fail_only_together_are_one_set_and_two_that_fail_alone_are_two() -> None:
    for pair in combinations(range(14), 2):
        together = asked(14, lambda kept, pair=pair: set(pair) <= set(kept))
        assert failing_sets(together) == ([list(pair)], True)
        alone = asked(14, lambda kept, pair=pair: not set(pair).isdisjoint(kept))
        sets, complete = failing_sets(alone)
        assert (sorted(sets), complete) == ([[pair[0]], [pair[1]]], True)


def test_a_culprit_that_another_masks_is_nothing_to_look_for_while_the_whole_passes() -> None:
    with pytest.raises(ValueError, match="needs a whole that fails"):
        failing_sets(asked(10, lambda kept: 3 in kept and 7 not in kept))


def test_what_is_left_and_undecided_makes_the_search_incomplete() -> None:
    def said(kept: Sequence[int]) -> Verdict:
        return Verdict.FAIL if 3 in kept else Verdict.INCONCLUSIVE if 7 in kept else Verdict.PASS

    assert failing_sets(Asked(range(10), said, 1000)) == ([[3]], False)


def test_the_smallest_part_is_what_the_failure_needs_and_nothing_else() -> None:
    needed = {3, 11, 12}
    assert smallest_part(list(range(20)), lambda kept: needed <= set(kept), 200) == sorted(needed)
    assert smallest_part(list(range(20)), lambda kept: True, 200) == []
    assert smallest_part(["a", "b", "a"], lambda kept: kept.count("a") == 2, 200) == ["a", "a"]


def test_it_stops_after_its_calls_with_a_list_that_fails() -> None:
    tried = 0

    def fails(kept: Sequence[int]) -> bool:
        nonlocal tried
        tried += 1
        return {3, 17} <= set(kept)

    assert {3, 17} <= set(smallest_part(list(range(40)), fails, 5))
    assert tried <= 5
