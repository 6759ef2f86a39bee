"""The arithmetic of the collectives, and that the kernels' twins of it are the same functions."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from decode_impl.parallel import protocol
from decode_impl.parallel.errors import RankTimeout
from decode_impl.parallel.protocol import CONTRIBUTE, GATHER

INTS = [0, 1, 2, 3, 7, 2**30, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1, -2, -1]


def test_a_flag_is_ready_for_its_own_call_and_the_next_and_not_before_across_every_wrap() -> None:
    epoch = 0
    for _ in range(3 * 2**3):
        later = protocol.next_epoch(epoch, bits=3)
        for wanted in (CONTRIBUTE, GATHER):
            want = protocol.flag_value(later, wanted, bits=3)
            assert protocol.is_ready(want, want, bits=3)
            assert protocol.is_ready(
                protocol.flag_value(protocol.next_epoch(later, bits=3), CONTRIBUTE, bits=3), want, 3
            )
            assert not protocol.is_ready(protocol.flag_value(epoch, GATHER, bits=3), want, bits=3)
        epoch = later


def test_successive_calls_use_different_slots_also_where_the_epoch_wraps() -> None:
    epoch = 2**31 - 3
    for _ in range(6):
        later = protocol.next_epoch(epoch)
        assert {protocol.slot(epoch), protocol.slot(later)} == {0, 1}
        epoch = later


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_no_two_messages_and_no_two_flags_share_a_place(ranks: int) -> None:
    mail = [
        protocol.mail_index(tile, slot, stage, source, ranks)
        for tile in range(3)
        for slot in range(protocol.SLOTS)
        for stage in range(protocol.STAGES)
        for source in range(ranks)
    ]
    assert sorted(mail) == list(range(len(mail)))
    flags = [protocol.flag_index(tile, source, ranks) for tile in range(3) for source in range(ranks)]
    assert sorted(flags) == list(range(len(flags)))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_pieces_of_a_two_shot_sum_cover_the_tile_once(ranks: int) -> None:
    covered = [place for owner in range(ranks) for place in range(*protocol.piece_range(owner, ranks, 64))]
    assert covered == list(range(64))


def test_a_wait_is_over_only_beyond_its_limit() -> None:
    assert [protocol.is_over(now, 10, 5) for now in (10, 15, 16)] == [False, False, True]


def test_a_ring_buffer_is_written_again_only_after_it_was_read() -> None:
    assert protocol.ring_slot(5, 2) == protocol.ring_slot(3, 2)
    assert protocol.may_overwrite(consumed=3, step=5, depth=2)
    assert not protocol.may_overwrite(consumed=2, step=5, depth=2)
    assert protocol.has_landed(5, 5)
    assert not protocol.has_landed(4, 5)


def test_the_reader_re_arms_the_slot_it_has_read() -> None:
    assert all(protocol.rearmed_slot(epoch) == protocol.slot(epoch) for epoch in range(-4, 4))


def test_an_error_of_a_collective_names_rank_slot_and_epoch_and_travels_between_processes() -> None:
    error = RankTimeout("rank 1 did not answer", rank=0, slot=1, epoch=9, source=1)
    assert "rank 0, slot 1, epoch 9" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.source) == (RankTimeout, str(error), 1)


def words(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def test_the_kernels_arithmetic_is_the_protocols_in_int32() -> None:
    signals = pytest.importorskip("decode_impl.specialized.kernels.signals")
    twins = {name: getattr(signals, name).fn for name in ("next_epoch", "slot", "flag_value", "is_ready")}
    for value in INTS:
        assert twins["next_epoch"](words([value])).tolist() == [protocol.next_epoch(value)]
        assert twins["slot"](words([value])).tolist() == [protocol.slot(value)]
        for stage in (CONTRIBUTE, GATHER):
            assert twins["flag_value"](words([value]), stage).tolist() == [protocol.flag_value(value, stage)]
        for other in INTS:
            ready = twins["is_ready"](words([value]), words([other]))
            assert ready.tolist() == [protocol.is_ready(value, other)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernels_places_are_the_protocols(ranks: int) -> None:
    signals = pytest.importorskip("decode_impl.specialized.kernels.signals")
    for tile, slot, stage, source in ((0, 0, 0, 0), (5, 1, 0, ranks - 1), (63, 0, 1, 1)):
        mine = protocol.mail_index(tile, slot, stage, source, ranks)
        assert int(signals.mail_index.fn(tile, slot, stage, source, ranks)) == mine
        assert signals.flag_index.fn(tile, source, ranks) == protocol.flag_index(tile, source, ranks)
