"""What of a step may run beside its main line: two results that need not wait for each other, and weights fetched.

A step is written once (`decode_impl/model.py`); whether its parts overlap is a matter of what it is given. In turn is
how a CPU runs it; `decode_impl.specialized.side_streams` has the form for CUDA. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")


class Overlap(Protocol):
    """How the parts of a step run beside each other."""

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """The results of two parts of which neither needs the other."""
        ...

    def fetch(self, *weights: Tensor) -> None:
        """These weights will be read soon: bring them nearer while the memory has little else to do."""
        ...

    def end(self) -> None:
        """The step is over; nothing of it runs on."""
        ...


class InTurn:
    """One after the other, and nothing fetched."""

    def both(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """First, then second."""
        return first(), second()

    def fetch(self, *weights: Tensor) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing runs on."""


IN_TURN: Overlap = InTurn()
"""How a step runs unless it is told otherwise."""
