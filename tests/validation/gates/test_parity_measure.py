"""What the parity gate measures on: windows of text, other compositions, sequences in lockstep, no logits kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity_settings import DECODE, PROMPT
from small_k3 import small_target
from torch import Tensor

from evals.text import load
from validation.gates.parity import measure
from validation.gates.parity.measure import Arms, measure_parity, other_composition, other_ranks, windows
from validation.targets.base import Arm, ArmConfig, Counters, ForcedStep


def texts() -> list[list[int]]:
    return [small_target().tokens(document.text) for document in load("heldout")]


def test_windows_are_seeded_pieces_of_heldout_documents_of_every_kind() -> None:
    drawn = windows(small_target(), 9, 64, seed=1)
    assert drawn == windows(small_target(), 9, 64, seed=1)
    assert drawn != windows(small_target(), 9, 64, seed=2)
    assert drawn[:4] == windows(small_target(), 4, 64, seed=1)
    sources = [str(tokens)[1:-1] for tokens in texts()]
    found = [[i for i, source in enumerate(sources) if str(window)[1:-1] in source] for window in drawn]
    assert all(len(window) == 64 for window in drawn)
    assert all(found)
    assert {i for places in found for i in places} == set(range(len(sources)))


def test_a_window_may_be_a_whole_document_and_not_longer() -> None:
    longest = max(texts(), key=len)
    assert windows(small_target(), 1, len(longest), seed=0) == [longest]
    with pytest.raises(ValueError, match=f"no held-out document has {len(longest) + 1} tokens"):
        windows(small_target(), 1, len(longest) + 1, seed=0)


def test_no_window_was_trained_on() -> None:
    target = small_target()
    trained = [str(target.tokens(document.text))[1:-1] for document in load("train")]
    for window in windows(target, 32, 64, seed=0):
        assert not any(str(window)[1:-1] in tokens for tokens in trained)


def test_the_other_composition_holds_every_sequence_once_in_other_company() -> None:
    assert other_composition(1) == [[0, 1]]
    for batch in range(2, 65):
        parts = other_composition(batch)
        assert [member for part in parts for member in part] == list(range(batch))
        assert all(0 < len(part) < batch for part in parts)


def test_the_other_number_of_ranks_is_another_that_the_same_model_allows() -> None:
    assert [other_ranks(ranks) for ranks in (1, 2, 4, 8, 16)] == [2, 1, 2, 4, 8]
    for ranks in range(1, 65):
        assert 1 <= other_ranks(ranks) <= max(2, ranks)
        assert other_ranks(ranks) != ranks


@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequence_is_compared_with_itself_in_the_floor(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arm three times: equal batches agree in every bit, and mixed-up rows would be far apart."""
    config = ArmConfig("baseline", max_batch=4, max_context=PROMPT + DECODE)
    arms = Arms(*(small_target().open(config) for _ in range(3)))
    sequences = windows(small_target(), 3, PROMPT + DECODE, seed=0)
    right = measure_parity(arms, sequences, batch, PROMPT)
    assert max(right["candidate"]["kl_by_sequence"]) == 0.0
    assert max(right["candidate"]["caches"]["state"]) == 0.0
    monkeypatch.setattr(measure, "other_composition", lambda batch: [[1, 0]] if batch == 1 else [[1, 2], [0]])
    wrong = measure_parity(arms, sequences, batch, PROMPT)
    assert max(right["floor"]["kl_by_sequence"]) < min(wrong["floor"]["kl_by_sequence"])


@pytest.mark.parametrize(("open_still", "sequences"), [(True, 6), (False, 2)])
def test_a_cell_left_open_is_looked_at_again_with_the_reserve(open_still: bool, sequences: int) -> None:
    config = ArmConfig("baseline", max_batch=2, max_context=PROMPT + DECODE)
    arms = Arms(*(small_target().open(config) for _ in range(3)))
    texts = windows(small_target(), 6, PROMPT + DECODE, seed=0)
    asked = []

    def undecided(candidate: Sequence[float], floor: Sequence[float]) -> bool:
        asked.append((len(candidate), len(floor)))
        return open_still

    seen = measure_parity(arms, texts[:2], 2, PROMPT, reserve=texts[2:], undecided=undecided)
    assert asked == [(2, 2)]
    assert seen["sequences"] == len(seen["candidate"]["kl_by_sequence"]) == sequences
    at_once = measure_parity(arms, texts[:sequences], 2, PROMPT)
    assert {**at_once, "looks": 2} == seen


def test_caches_and_slots_are_given_back() -> None:
    arm = small_target().open(ArmConfig("baseline", max_batch=2, max_context=PROMPT + DECODE))
    arms = Arms(arm, small_target().open(arm.config), small_target().open(arm.config))
    sequences = windows(small_target(), 6, PROMPT + DECODE, seed=0)
    # Three groups in a pool for one: a slot or a page that is kept would make the next group fail.
    assert measure_parity(arms, sequences, 2, PROMPT)["sequences"] == 6


@dataclass
class CountedLogits:
    """How many logits tensors are alive, and how many were at most."""

    alive: int = 0
    most: int = 0

    def make(self, rows: int) -> Tensor:
        logits = torch.randn(rows, 64)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(logits, self._gone)
        return logits

    def _gone(self) -> None:
        self.alive -= 1


class StubArm:
    """An arm whose decode is random logits, each of them counted while it lives."""

    config = ArmConfig("stub")

    def __init__(self, counted: CountedLogits) -> None:
        self._counted = counted

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> Any:
        arm, rows, length = self, len(sequences), len(sequences[0])

        class Decode:
            def __iter__(self) -> Iterator[ForcedStep]:
                for position in range(prompt_length, length):
                    logits = arm._counted.make(rows)
                    yield ForcedStep(logits, tuple(range(rows)), (position,) * rows, "specialized")
                    del logits

            def state(self, sequence: int) -> dict[str, Tensor]:
                return {f"layer.0.{kind}": torch.ones(2) for kind in ("state", "conv", "latent")}

            def close(self) -> None:
                pass

        return Decode()

    def counters(self) -> Counters:
        return Counters()


def test_no_logits_outlive_their_step() -> None:
    most = []
    for steps in (3, 60):
        counted = CountedLogits()
        arm: Arm = StubArm(counted)  # type: ignore[assignment]
        measure_parity(Arms(arm, arm, arm), [[0] * (4 + steps)] * 4, 2, 4)
        assert counted.alive == 0
        most.append(counted.most)
    assert most[0] == most[1]
