"""The kernels of the collectives, one rank at a time under the interpreter: its peers have answered already."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_impl.parallel.errors import RankAborted, RankDisagreed, RankTimeout
from decode_impl.parallel.protocol import (
    ABORTED,
    CONTRIBUTE,
    DISAGREED,
    GATHER,
    TIMED_OUT,
    flag_value,
    mail_index,
    next_epoch,
    piece_range,
    slot,
)
from decode_impl.parallel.reduce import grouped_sum, sequential_sum
from decode_impl.parallel.workspace import BLOCK, Collectives, on_one_device

pytest.importorskip("triton")

ELEMENTS = 2 * BLOCK
N = BLOCK + 90
"""The last tile is not full."""


@dataclass
class Ranks:
    """All ranks' workspaces on one CPU, after `finished` calls of every tile."""

    all: list[Collectives]
    finished: int

    @property
    def me(self) -> Collectives:
        return self.all[1]

    @property
    def epoch(self) -> int:
        return next_epoch(self.finished)

    def flags(self, at: Collectives) -> Tensor:
        layout = at.layout
        rows = layout.tiles + 1
        area = at.memory[layout.flags_at : layout.flags_at + rows * layout.ranks * 4]
        return area.view(torch.int32).view(rows, layout.ranks)

    def mail(self, at: Collectives, tile: int, stage: int, source: int) -> Tensor:
        place = mail_index(tile, slot(self.epoch), stage, source, at.layout.ranks)
        return at.memory[place * BLOCK * 2 : (place + 1) * BLOCK * 2].view(torch.bfloat16)

    def answer(self, stage: int) -> None:
        """Every peer has told rank 1 that its data of this stage are there."""
        for at in self.all:
            if at is not self.me:
                self.flags(self.me)[:, at.rank] = flag_value(self.epoch, stage)


def ranks_of(count: int, finished: int = 0) -> Ranks:
    made = on_one_device(count, ELEMENTS, torch.device("cpu"), 1000)
    for at in made:
        at.epochs.fill_(finished)
    ranks = Ranks(made, finished)
    for at in made:
        ranks.flags(at).fill_(flag_value(finished, GATHER))
    return ranks


def inputs(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(count)
    return [torch.randn(ELEMENTS, generator=draw).bfloat16() for _ in range(count)]


def tiles(x: Tensor) -> list[Tensor]:
    padded = torch.zeros(ELEMENTS, dtype=x.dtype)
    padded[:N] = x[:N]
    return list(padded.view(-1, BLOCK))


FINISHED = [0, 1, 2**31 - 1]
"""Before the first call, an odd one, and where the epoch wraps."""


@pytest.mark.parametrize("finished", FINISHED)
@pytest.mark.parametrize("count", [2, 4])
def test_a_one_shot_sum_sends_all_to_all_and_adds_in_the_one_shot_order(count: int, finished: int) -> None:
    ranks, x = ranks_of(count, finished), inputs(count)
    ranks.answer(GATHER)
    for source in (at.rank for at in ranks.all if at is not ranks.me):
        for tile, row in enumerate(tiles(x[source])):
            ranks.mail(ranks.me, tile, CONTRIBUTE, source).copy_(row)
    y = torch.zeros(N, dtype=torch.bfloat16)
    ranks.me.one_shot(x[1][:N].clone(), y)
    assert torch.equal(y, grouped_sum(x).bfloat16()[:N])
    assert ranks.me.epochs.tolist() == [ranks.epoch, ranks.epoch, finished]
    for peer in (at for at in ranks.all if at is not ranks.me):
        assert ranks.flags(peer)[:2, 1].tolist() == [flag_value(ranks.epoch, GATHER)] * 2
        for tile, row in enumerate(tiles(x[1])):
            assert torch.equal(ranks.mail(peer, tile, CONTRIBUTE, 1), row)


@pytest.mark.parametrize("finished", FINISHED)
@pytest.mark.parametrize("count", [2, 4])
def test_a_two_shot_sum_adds_its_own_piece_in_rank_order_and_gathers_the_others(count: int, finished: int) -> None:
    ranks, x = ranks_of(count, finished), inputs(count)
    ranks.answer(GATHER)
    total, piece = sequential_sum(x).bfloat16(), BLOCK // count
    for source in (at.rank for at in ranks.all if at is not ranks.me):
        for tile, row in enumerate(tiles(x[source])):
            ranks.mail(ranks.me, tile, CONTRIBUTE, source)[:piece] = row[slice(*piece_range(1, count, BLOCK))]
            theirs = tiles(total)[tile][slice(*piece_range(source, count, BLOCK))]
            ranks.mail(ranks.me, tile, GATHER, source)[:piece] = theirs
    y = torch.zeros(N, dtype=torch.bfloat16)
    ranks.me.two_shot(x[1][:N].clone(), y)
    assert torch.equal(y, total[:N])
    for peer in (at for at in ranks.all if at is not ranks.me):
        assert ranks.flags(peer)[:2, 1].tolist() == [flag_value(ranks.epoch, GATHER)] * 2
        for tile, row in enumerate(tiles(x[1])):
            sent = ranks.mail(peer, tile, CONTRIBUTE, 1)[:piece]
            assert torch.equal(sent, row[slice(*piece_range(peer.rank, count, BLOCK))])
            mine = tiles(total)[tile][slice(*piece_range(1, count, BLOCK))]
            assert torch.equal(ranks.mail(peer, tile, GATHER, 1)[:piece], mine)


def test_a_sum_in_place_reads_the_peers_inputs_and_tells_when_it_has() -> None:
    ranks, x = ranks_of(4), inputs(4)
    ranks.answer(GATHER)
    for at in ranks.all:
        at.inputs.copy_(x[at.rank])
    y = torch.zeros(N, dtype=torch.bfloat16)
    ranks.me.in_place(y)
    assert torch.equal(y, sequential_sum(x).bfloat16()[:N])
    assert ranks.flags(ranks.all[0])[:2, 1].tolist() == [flag_value(ranks.epoch, GATHER)] * 2


def word(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def test_ranks_that_decided_alike_agree_and_one_that_did_not_is_named() -> None:
    for theirs in (7, 8):
        ranks = ranks_of(2)
        ranks.answer(GATHER)
        at = ranks.me.layout.words_at + (slot(ranks.epoch) * 2 + 0) * 4
        ranks.me.memory[at : at + 4].view(torch.int32)[0] = theirs
        ranks.me.agree(word(7))
        if theirs == 7:
            ranks.me.check()
            continue
        with pytest.raises(RankDisagreed, match="rank 1, slot 1, epoch 1: rank 0 decided otherwise"):
            ranks.me.check()


def test_after_a_failure_a_kernel_publishes_nothing_and_the_host_is_told_again() -> None:
    for code, kind in ((TIMED_OUT, RankTimeout), (DISAGREED, RankDisagreed), (ABORTED, RankAborted)):
        ranks, x = ranks_of(2), inputs(2)
        ranks.me.failure.copy_(torch.tensor([code, 1, 5, 0], dtype=torch.int32))
        before = [at.memory.clone() for at in ranks.all]
        y = torch.zeros(N, dtype=torch.bfloat16)
        for call in (lambda: ranks.me.one_shot(x[1][:N].clone(), y), lambda: ranks.me.agree(word(1))):  # noqa: B023
            call()
        assert all(torch.equal(at.memory, kept) for at, kept in zip(ranks.all, before, strict=True))
        with pytest.raises(kind, match="rank 1, slot 1, epoch 5"):
            ranks.me.check()


def test_an_aborted_rank_gives_up_and_tells_every_rank() -> None:
    ranks, x = ranks_of(2), inputs(2)
    abort = ranks.me.layout.abort_at
    ranks.me.memory[abort] = 1
    ranks.me.one_shot(x[1][:N].clone(), torch.zeros(N, dtype=torch.bfloat16))
    with pytest.raises(RankAborted, match="rank 1, slot 1, epoch 1: a peer gave up"):
        ranks.me.check()
    assert ranks.all[0].memory[abort] == 1
    assert ranks.me.epochs.tolist() == [0, 0, 0]


def test_a_sum_larger_than_the_workspace_is_refused() -> None:
    ranks = ranks_of(2)
    with pytest.raises(ValueError, match="4096 elements given, the workspace is made for 2048"):
        ranks.me.one_shot(torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16))


_COMPILE = """
import re, torch
from benchmarks.kernel_resources import compiled_launches
from decode_impl.parallel.workspace import on_one_device
at = on_one_device(4, 2048, torch.device("cpu"), 1000)[1]
x, y = (torch.zeros(2048, dtype=torch.bfloat16) for _ in range(2))
for stalled in (False, True):
    at.stalls = torch.zeros(8, dtype=torch.int32) if stalled else None
    with compiled_launches() as found:
        at.one_shot(x, y), at.two_shot(x, y), at.in_place(y), at.agree(torch.zeros(1, dtype=torch.int32))
    for kernel in found:
        print(kernel.name, stalled, kernel.spills, "nanosleep" in kernel.ptx, "sys.release" in kernel.ptx,
              "sys.acquire" in kernel.ptx, "multimem" in kernel.ptx)
"""


def test_compiled_for_sm90_flags_are_release_and_acquire_at_system_scope_and_delays_are_compiled_out() -> None:
    """In a process of its own: kernels are either compiled or interpreted, by a variable that is read at import."""
    root = Path(__file__).parents[3]
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for name, stalled, spills, sleeps, releases, acquires, multicast in lines:
        assert (spills, releases, acquires, multicast) == ("0", "True", "True", "False"), name
        assert sleeps == ("True" if stalled == "True" and name != "agree_kernel" else "False"), name
