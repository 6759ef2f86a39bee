"""Ranks of the GPU stress run: one process per GPU over symmetric memory, or several streams of one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode_impl.parallel.errors import CollectiveError
from decode_impl.parallel.workspace import Collectives, on_one_device, over_group

ELEMENTS = 64 * 1024
"""Largest sum: 64 tiles of 1,024 BF16 values."""

SIZES = (1024, 16384, 3072, 65536, 16)
"""Elements of successive steps: tiles come and go with the batch."""

MODULUS = 251
"""Payload has this many values; it is prime, so that neighbouring steps, ranks and positions differ."""

WARM_UP = 99
"""A failure code: kernels return at once, so that they are compiled and loaded before any rank waits for another."""


@dataclass
class Rank:
    """One rank: its collectives, its stream, and what it has counted on the device."""

    at: Collectives
    stream: Any
    x: Tensor
    y: Tensor
    step: Tensor
    wrong: Tensor
    digest: Tensor
    places: Tensor
    graph: Any = None
    said: str = ""
    parts: list[Tensor] = field(default_factory=list)

    def payload(self, rank: int, n: int) -> Tensor:
        """What a rank contributes to the present step: BF16 values that hold exactly, other ones in every step."""
        values = (self.places[:n] * 7 + self.step * 17 + rank * 131) % MODULUS - MODULUS // 2
        return (values.float() / 16).bfloat16()

    def run(self, kind: str, n: int) -> None:
        """One call: new input, the sum, the input poisoned as soon as the call has returned, the sum compared."""
        ranks = self.at.layout.ranks
        x = self.at.inputs[:n] if kind == "in_place" else self.x[:n]
        y = self.y[:n]
        x.copy_(self.payload(self.at.rank, n))
        y.fill_(float("nan"))
        if kind == "in_place":
            self.at.in_place(y)
        elif kind == "one_shot":
            self.at.one_shot(x, y)
        else:
            self.at.two_shot(x, y)
        x.fill_(float("nan"))
        # Payload is a multiple of 1/16 below 8, so that FP32 sums it exactly in any order.
        right = torch.stack([self.payload(rank, n).float() for rank in range(ranks)]).sum(0).bfloat16()
        bits = y.view(torch.int16)
        self.wrong += (bits != right.view(torch.int16)).sum()
        self.digest += (bits.long() * (self.places[:n] % 8191 + 1)).sum()
        self.step += 1


class Fleet:
    """The ranks that this process runs: all of them on one GPU, or its own of several GPUs."""

    def __init__(self, ranks: int, local: bool, limit_us: int, wrong: int = 0) -> None:
        self.ranks, self.local = ranks, local
        if local:
            device = torch.device("cuda", 0)
            made = on_one_device(ranks, ELEMENTS, device, limit_us)
        else:
            import torch.distributed as dist

            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            made = [over_group(dist.group.WORLD, ELEMENTS, device, limit_us)]
        self.device = device
        self.mine = [_rank(at, device) for at in made]
        for rank in self.mine:
            rank.at.wrong = wrong
        self._warm_up()

    def each(self, do: Callable[[Rank], None]) -> None:
        """Do something on every rank's stream."""
        for rank in self.mine:
            with torch.cuda.stream(rank.stream):
                do(rank)

    def finish(self) -> list[str]:
        """Wait for all ranks; what each of this process's ranks says went wrong, empty where nothing did."""
        for rank in self.mine:
            with torch.cuda.stream(rank.stream):
                try:
                    rank.at.check()
                    rank.said = ""
                except CollectiveError as error:
                    rank.said = f"{type(error).__name__}: {error}"
        torch.cuda.synchronize(self.device)
        return [rank.said for rank in self.mine]

    def meet(self) -> None:
        """All processes get here before any goes on."""
        torch.cuda.synchronize(self.device)
        if not self.local:
            import torch.distributed as dist

            dist.barrier()

    def gathered(self, value: Any) -> list[Any]:
        """Every process's value; in one process, the value alone."""
        if self.local:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def _warm_up(self) -> None:
        """Compile and load everything while no rank waits for another."""
        word = torch.zeros(1, dtype=torch.int32, device=self.device)
        delays = torch.zeros(8, dtype=torch.int32, device=self.device)

        def once(rank: Rank) -> None:
            rank.at.failure[0] = WARM_UP
            for stalls in (None, delays):
                rank.at.stalls = stalls
                for kind in ("one_shot", "two_shot", "in_place"):
                    for n in SIZES:
                        rank.run(kind, n)
            rank.at.agree(word)
            rank.at.stalls = None
            for counted in (rank.at.failure, rank.wrong, rank.digest, rank.step):
                counted.zero_()

        self.each(once)
        self.meet()


def _rank(at: Collectives, device: torch.device) -> Rank:
    def zero() -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=device)

    x, y = (torch.empty(ELEMENTS, dtype=torch.bfloat16, device=device) for _ in range(2))
    places = torch.arange(ELEMENTS, dtype=torch.int64, device=device)
    return Rank(at, torch.cuda.Stream(device), x, y, zero(), zero(), zero(), places)


def delays_of(seed: int, steps: int, ranks: int, share: float, longest: int) -> Tensor:
    """Microseconds of delay, int32 [steps, ranks, 8]: a seeded plan, the same in every process."""
    draw = torch.Generator().manual_seed(seed)
    shape = (steps, ranks, 8)
    sizes = torch.tensor([longest // 100, longest // 10, longest], dtype=torch.int32)[
        torch.randint(0, 3, shape, generator=draw)
    ]
    return sizes * (torch.rand(shape, generator=draw) < share).int()


def counted(fleet: Fleet, plan: Tensor, points: Sequence[str]) -> dict[str, int]:
    """How often each sync point was delayed."""
    return {point: int((plan[:, : fleet.ranks, index] > 0).sum()) for index, point in enumerate(points)}
