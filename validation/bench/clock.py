"""Times of two calls taken in turn, and what is told of them: how many, the median, the middle half."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]

FLUSH_BYTES = 256 << 20
"""Bytes written before every timed call on a GPU: five times the L2 of an H200, so that each finds it cold."""


@dataclass(frozen=True)
class Spread:
    """`n` readings: their median and quartiles, in the unit of the readings."""

    n: int
    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, readings: Sequence[float]) -> Spread:
        """Raises ValueError where there is none, or one that is no finite number."""
        if not readings or not np.isfinite(readings).all():
            raise ValueError(f"readings must be finite numbers, at least one; given are {list(readings)}")
        q1, median, q3 = (float(x) for x in np.percentile(readings, (25, 50, 75)))
        return cls(len(readings), median, q1, q3)

    def json(self) -> dict[str, Any]:
        """As plain JSON, with the width of the middle half."""
        return {**asdict(self), "iqr": self.q3 - self.q1}


class Clock:
    """Seconds of one call: by events on the device's own clock, after a flush of L2, or by the host's clock."""

    def __init__(self, device: torch.device, flush: bool = True) -> None:
        self.device = device
        self.name = "host clock"
        if device.type == "cuda":
            self.name = "CUDA events, L2 flushed before every reading" if flush else "host clock, device synchronised"
        self._flush = None
        if device.type == "cuda" and flush:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(self, call: Call) -> float:
        """How long `call` took, once."""
        if self._flush is not None:
            return self._by_events(call)
        begun = self.now()
        call()
        return self.now() - begun

    def now(self) -> float:
        """The host's clock, in seconds, once the device has done all that was asked of it."""
        self.wait()
        return time.perf_counter()

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_events(self, call: Call) -> float:
        assert self._flush is not None
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


@dataclass(frozen=True)
class Pair:
    """Readings of two arms, two a round, and of every round the quotient of the first arm's by the second's."""

    first: Sequence[float]
    second: Sequence[float]
    quotients: Sequence[float]

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Pair:
        """From readings that were taken in rounds of A B B A."""
        pairs = range(0, len(first), 2)
        return cls(first, second, [sum(first[i : i + 2]) / sum(second[i : i + 2]) for i in pairs])


def interleaved(
    read: Callable[[Call], float], first: Call, second: Call, rounds: int, most_s: float = float("inf")
) -> Pair:
    """Readings in the order A B B A, which cancels what drifts evenly: at least one round, then until `rounds` or time.

    A quotient above 1 says that the second arm took less of what `read` reads.
    """
    a: list[float] = []
    b: list[float] = []
    begun = time.monotonic()
    while len(a) < 2 * rounds and (not a or time.monotonic() - begun < most_s):
        readings = [read(call) for call in (first, second, second, first)]
        a += [readings[0], readings[3]]
        b += readings[1:3]
    return Pair.of(a, b)
