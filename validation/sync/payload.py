"""Names for payload: every piece of every call has its own, so that a wrong one tells where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_impl.parallel.operations import Message
from decode_impl.parallel.protocol import CONTRIBUTE


@dataclass(frozen=True, slots=True)
class Part:
    """What `source` contributes to `call`."""

    call: int
    source: int
    piece: int

    def __str__(self) -> str:
        return f"part {self.piece} of call {self.call} from {self.source}"


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of one piece over all ranks, in rank order."""

    call: int
    piece: int

    def __str__(self) -> str:
        return f"sum {self.piece} of call {self.call}"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A sum of anything else."""

    call: int
    parts: tuple[object, ...]

    def __str__(self) -> str:
        return f"wrong sum in call {self.call}: {', '.join(map(str, self.parts))}"


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """What a rank decided for a call; equal to what another rank decided alike."""

    call: int
    source: int
    digest: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decided) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"decision {self.digest} for call {self.call} from {self.source}"


POISON = "poison"
"""What a caller may write over its input as soon as a call has returned."""


def added(call: int, ranks: int, parts: Sequence[object]) -> Sum | Wrong:
    """The sum of `parts`, right only where every rank's own part of this call is there, in rank order."""
    piece = parts[0].piece if isinstance(parts[0], Part) else -1
    right = tuple(Part(call, rank, piece) for rank in range(ranks))
    return Sum(call, piece) if tuple(parts) == right else Wrong(call, tuple(parts))


def expected(call: int, message: Message, decisions: Sequence[int] | None) -> object:
    """What a load of `message` in `call` must find."""
    if decisions is not None:
        return Decided(call, message.source, decisions[message.source])
    if message.stage == CONTRIBUTE:
        return Part(call, message.source, message.piece)
    return Sum(call, message.piece)
