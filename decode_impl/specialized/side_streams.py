"""Parts of a specialised step beside its main line, on streams of their own.

Kernels between two large products (recurrence, attention, router, norms, chosen experts) leave most of the memory's
bandwidth idle. The shared expert runs beside the routed ones, and the weights of the next large product are asked for
into L2 meanwhile. Forks and joins are events, so all of it is captured into the step's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")

FETCHED_BYTES = 24 << 20
"""At most so much of one product's weights is fetched: an H200 has 50 MB of L2, in two halves that may both hold a
line, and what runs meanwhile needs some of it."""


class SideStreams:
    """The streams beside one main line; a process has one of these per device and captured step."""

    def __init__(self, device: torch.device, fetched_bytes: int = FETCHED_BYTES) -> None:
        self._second, self._fetching = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._bytes = fetched_bytes
        self._fetched = False

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """`second` on a stream of its own; the main line goes on when both are done."""
        main = torch.cuda.current_stream(self._second.device)
        self._second.wait_stream(main)
        with torch.cuda.stream(self._second):
            other = second()
        own = first()
        main.wait_stream(self._second)
        return own, other

    def fetch(self, *weights: Tensor) -> None:
        """Ask for the first bytes of these weights into L2, from where the main line now is."""
        from decode_impl.specialized.kernels.fetch import fetch_into_l2  # needs Triton

        if not self._bytes:
            return
        self._fetching.wait_stream(torch.cuda.current_stream(self._fetching.device))
        with torch.cuda.stream(self._fetching):
            left = self._bytes
            for weight in weights:
                left -= fetch_into_l2(weight, left)
        self._fetched = True

    def end(self) -> None:
        """The main line waits for what was asked for last: a graph may not end with a stream that nobody joined."""
        if self._fetched:
            torch.cuda.current_stream(self._fetching.device).wait_stream(self._fetching)
        self._fetched = False
