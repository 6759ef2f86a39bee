"""What ends a step on every rank: a wait that was not answered, or ranks that decided differently."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective that did not complete. `source` is the rank that was waited for."""

    def __init__(self, why: str, *, rank: int, slot: int, epoch: int, source: int) -> None:
        super().__init__(f"rank {rank}, slot {slot}, epoch {epoch}: {why}; the engine must be restarted")
        self.why, self.rank, self.slot, self.epoch, self.source = why, rank, slot, epoch, source

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes."""
        return _again, (type(self), self.why, self.rank, self.slot, self.epoch, self.source)


class RankTimeout(CollectiveError):
    """A rank waited for another one longer than it may."""


class RankAborted(CollectiveError):
    """A peer gave up, so this rank does too."""


class RankDisagreed(CollectiveError):
    """A rank decided otherwise about the step; nobody ran it."""


def _again(kind: type[CollectiveError], why: str, rank: int, slot: int, epoch: int, source: int) -> CollectiveError:
    return kind(why, rank=rank, slot=slot, epoch=epoch, source=source)
