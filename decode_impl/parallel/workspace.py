"""A rank's share of the memory that the collectives' kernels use, and the calls that launch them.

Workspaces are symmetric: laid out alike on all ranks, and each rank can write every peer's. `over_group` takes them
from torch's symmetric memory, `on_one_device` gives several ranks on one GPU (each on a stream of its own) to tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode_impl.parallel.errors import CollectiveError, RankAborted, RankDisagreed, RankTimeout
from decode_impl.parallel.protocol import ABORTED, DISAGREED, SLOTS, STAGES, TIMED_OUT, slot

BLOCK = 1024
"""BF16 elements of a tile."""

_THREAD_GROUPS = 4
_ALIGN = 256
_ERRORS: dict[int, tuple[type[CollectiveError], str]] = {
    TIMED_OUT: (RankTimeout, "rank {source} did not answer in time"),
    DISAGREED: (RankDisagreed, "rank {source} decided otherwise about the step"),
    ABORTED: (RankAborted, "a peer gave up while rank {source} was waited for"),
}


@dataclass(frozen=True)
class Layout:
    """Where the areas of a workspace begin, in bytes, for sums of up to `elements` and one agreement."""

    ranks: int
    elements: int

    @property
    def tiles(self) -> int:
        """Tiles of the largest sum."""
        return -(-self.elements // BLOCK)

    @property
    def flags_at(self) -> int:
        """int32 [tiles + 1, ranks], behind the mail; the last row is the agreement's."""
        return _aligned(self.tiles * SLOTS * STAGES * self.ranks * BLOCK * 2)

    @property
    def words_at(self) -> int:
        """int32 [SLOTS, ranks]."""
        return self.flags_at + _aligned((self.tiles + 1) * self.ranks * 4)

    @property
    def abort_at(self) -> int:
        """int32 [1]."""
        return self.words_at + _aligned(SLOTS * self.ranks * 4)

    @property
    def inputs_at(self) -> int:
        """bf16 [elements], for sums in place."""
        return self.abort_at + _ALIGN

    @property
    def bytes(self) -> int:
        """Size of a workspace."""
        return self.inputs_at + _aligned(self.elements * 2)


class Collectives:
    """One rank's collectives. Launches go to the current stream, one stream for all calls of a rank.

    `limit_us` bounds every wait. `wrong` and `stalls` (int32 [5], microseconds by sync point) are for tests.
    """

    def __init__(self, layout: Layout, rank: int, memory: Tensor, peers: Sequence[int], limit_us: int) -> None:
        self.layout, self.rank, self.memory, self.limit_us = layout, rank, memory, limit_us
        device = memory.device
        self.peers = torch.tensor(peers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(layout.tiles + 1, dtype=torch.int32, device=device)
        self.late = torch.zeros(layout.tiles + 1, dtype=torch.int32, device=device)
        self.failure = torch.zeros(4, dtype=torch.int32, device=device)
        self.stalls: Tensor | None = None
        self.wrong = 0
        self._no_stalls = torch.zeros(8, dtype=torch.int32, device=device)

    @property
    def inputs(self) -> Tensor:
        """Where this rank's input of a sum in place lies, bf16 [elements]."""
        start = self.layout.inputs_at
        return self.memory[start : start + 2 * self.layout.elements].view(torch.bfloat16)

    def one_shot(self, x: Tensor, y: Tensor) -> None:
        """Sum bf16 x over all ranks into y: groups of a quarter of the ranks, then the groups, in FP32."""
        group = -(-self.layout.ranks // _THREAD_GROUPS)
        self._launch("one_shot_kernel", (x, y), x.numel(), GROUP=group)

    def two_shot(self, x: Tensor, y: Tensor) -> None:
        """Sum bf16 x over all ranks into y: in rank order, in FP32, each piece by the rank that owns it."""
        self._launch("two_shot_kernel", (x, y), x.numel())

    def in_place(self, y: Tensor) -> None:
        """Sum the first elements of all ranks' `inputs` into bf16 y, in rank order, in FP32."""
        self._launch("in_place_kernel", (y, self.layout.inputs_at), y.numel())

    def agree(self, word: Tensor) -> None:
        """End the step unless all ranks have the same int32 [1]."""
        from decode_impl.specialized.kernels import collectives as kernels  # needs Triton

        layout = self.layout
        kernels.agree_kernel[1,](
            word, self.peers, self.epochs, self.late, self.failure, layout.tiles, layout.words_at, layout.flags_at,
            layout.abort_at, self.limit_us, RANK=self.rank, RANKS=layout.ranks, num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the stream and raise what went wrong in it.

        Raises:
            CollectiveError: a call failed since the workspace was made; every later call failed too.
        """
        code, tile, epoch, source = self.failure.tolist()
        if code:
            kind, why = _ERRORS[code]
            why = why.format(source=source) + f" (tile {tile})"
            raise kind(why, rank=self.rank, slot=slot(epoch), epoch=epoch, source=source)

    def _launch(self, name: str, arguments: tuple[Any, ...], n: int, **constants: int) -> None:
        from decode_impl.specialized.kernels import collectives as kernels  # needs Triton

        layout, stalls = self.layout, self._no_stalls if self.stalls is None else self.stalls
        if n > layout.elements:
            raise ValueError(f"{n} elements given, the workspace is made for {layout.elements}")
        getattr(kernels, name)[-(-n // BLOCK),](
            *arguments, self.peers, self.epochs, self.late, self.failure, stalls, n, layout.flags_at, layout.abort_at,
            self.limit_us, RANK=self.rank, RANKS=layout.ranks, BLOCK=BLOCK, STALLED=self.stalls is not None,
            WRONG=self.wrong, num_warps=4, **constants,
        )  # fmt: skip


def over_group(group: Any, elements: int, device: torch.device, limit_us: int) -> Collectives:
    """This process's rank of a process group, over torch's symmetric memory. All ranks call it together."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    # Nothing here multicasts, and setting it up needs rights and hardware that a host may lack.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout = Layout(ranks, elements)
    memory = symmetric.empty(layout.bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    # Nobody may write into a workspace that its owner has not cleared yet.
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return Collectives(layout, rank, memory, handle.buffer_ptrs, limit_us)


def on_one_device(ranks: int, elements: int, device: torch.device, limit_us: int) -> list[Collectives]:
    """All ranks on one GPU. Their launches must be on different streams, and fit on the device together."""
    layout = Layout(ranks, elements)
    memories = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    pointers = [memory.data_ptr() for memory in memories]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [Collectives(layout, rank, memory, pointers, limit_us) for rank, memory in enumerate(memories)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
