"""Memory that rank processes share: every rank's flags, mail and inputs as numpy views of one mapped file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from decode_impl.parallel.operations import Place
from decode_impl.parallel.protocol import SENTINEL, SLOTS, STAGES

TILES = 5
AGREEMENT, FIRST, FLAGLESS, IN_PLACE = 0, 1, 3, 4
"""Tiles by use: the step's agreement, one-shot and two-shot sums (two tiles), mail without flags, inputs in place."""

WORDS = 32
"""32-bit words of one piece of payload."""

_CONTROL = 8
ABORT, READY = 0, 1
"""Words of a rank's control block: a peer has given up; this rank is at the start line."""


class SharedMemory:
    """The views of all ranks. The file must be zeros, and hold `bytes_of(ranks)` bytes for each job."""

    def __init__(self, path: Path, ranks: int, job: int) -> None:
        size = bytes_of(ranks)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        place = job * size
        self.control: list[Any] = []
        self._areas: list[dict[str, Any]] = []
        for _ in range(ranks):
            views = {}
            for name, dtype, shape in _areas(ranks):
                count = int(np.prod(shape))
                views[name] = np.frombuffer(self._map, dtype, count, place).reshape(shape)
                place += count * np.dtype(dtype).itemsize
            self.control.append(views.pop("control"))
            self._areas.append(views)

    def arm(self, rank: int, ranks: int) -> None:
        """Fill the mail of this rank that has no flags with the sentinel."""
        messages = SLOTS * STAGES * ranks
        self._areas[rank]["mail"][FLAGLESS * messages : (FLAGLESS + 1) * messages] = SENTINEL

    def view(self, place: Place) -> Any:
        """The words at a place: one flag as an array of one, or one piece of payload."""
        area = self._areas[place.agent][place.area]
        return area[place.index[0], place.index[1] : place.index[1] + 1] if place.area == "flag" else area[place.index]


def bytes_of(ranks: int) -> int:
    """Bytes of one job, all ranks together."""
    return ranks * sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for _, dtype, shape in _areas(ranks))


def _areas(ranks: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        ("control", "int64", (_CONTROL,)),
        ("flag", "int64", (TILES, ranks)),
        ("mail", "uint32", (TILES * SLOTS * STAGES * ranks, ranks, WORDS)),
        ("input", "uint32", (TILES, ranks, WORDS)),
    ]
