"""Delta debugging finds the part of a failing list that fails by itself."""

from __future__ import annotations

from collections.abc import Sequence

from validation.delta_debugging import smallest_part


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
