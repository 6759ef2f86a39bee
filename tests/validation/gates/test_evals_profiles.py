"""The shipped profiles ask enough questions to decide their own margins."""

from __future__ import annotations

import pytest

from evals.statistics import Noise, Outcome, chances, decide, designed, evidence
from validation.profile import load_profile


@pytest.mark.parametrize(("name", "margin"), [("nightly", 0.02), ("signoff", 0.01)])
def test_a_profile_has_enough_repeats_to_decide_its_margin(name: str, margin: float) -> None:
    """Of arms that share their random numbers, and differ in one pair of two hundred by chance."""
    evals = load_profile(name)[1].gates["evals"]["evals"]
    assert len(evals) == 3
    for entry in evals:
        assert entry["margin"] == margin
        assert chances(designed(Noise(0.005, 0.0), entry["items"], entry["repeats"]), margin).go >= 0.8


def test_before_a_merge_one_pair_lost_by_chance_does_not_stop_an_equal_candidate_and_two_do() -> None:
    for entry in load_profile("premerge")[1].gates["evals"]["evals"]:
        outcomes = [
            decide(evidence([1.0] * lost + [0.0] * (entry["items"] - lost), entry["items"]), entry["margin"])
            for lost in range(3)
        ]
        assert outcomes == [Outcome.GO, Outcome.GO, Outcome.UNDECIDED], entry["name"]
