"""The routing decision of a step: specialised, or generic with a named reason.

Every predicate is a function of values that all ranks share, so that no rank can take another path than its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from decode_impl.batch import Chunk
from decode_impl.specialized.contract import MAX_ROWS, batch_bin


class Fallback(StrEnum):
    """Why a step runs generic although the specialised path is on."""

    EMPTY = "no rows"
    PREFILL = "prefill only"
    MIXED = "prefill mixed with decode"
    FIRST_TOKEN = "one-token prompt: no decode state yet"
    TOO_MANY_ROWS = f"more than {MAX_ROWS} rows"
    ALL_LOGITS = "logits of prompt tokens wanted"


@dataclass(frozen=True)
class Decision:
    """Where a step goes. `bin` is its padded row count on the specialised path; a generic step may have a `reason`."""

    bin: int | None
    reason: Fallback | None

    @property
    def specialized(self) -> bool:
        """True where the specialised path runs."""
        return self.bin is not None


class RankDisagreement(RuntimeError):
    """Ranks decided differently about one step: running it would mix paths or wait for ever."""


def plan(chunks: Sequence[Chunk], all_logits: bool = False) -> Decision:
    """Decide for one step, from the shapes of its chunks alone.

    A one-token chunk that begins its request is a prefill, however much it looks like a decode row.
    """
    decode = sum(len(chunk.tokens) == 1 and chunk.start > 0 for chunk in chunks)
    prefill = len(chunks) - decode
    reason = None
    if not chunks:
        reason = Fallback.EMPTY
    elif all_logits:
        reason = Fallback.ALL_LOGITS
    elif prefill and decode:
        reason = Fallback.MIXED
    elif prefill:
        only_first_tokens = all(len(chunk.tokens) == 1 for chunk in chunks)
        reason = Fallback.FIRST_TOKEN if only_first_tokens else Fallback.PREFILL
    elif decode > MAX_ROWS:
        reason = Fallback.TOO_MANY_ROWS
    return Decision(None, reason) if reason else Decision(batch_bin(decode), None)


def require_agreement(decisions: Sequence[Decision]) -> Decision:
    """The decision that all ranks took.

    Raises:
        RankDisagreement: some rank decided otherwise; the first such rank is named.
    """
    for rank, decision in enumerate(decisions):
        if decision != decisions[0]:
            raise RankDisagreement(
                f"rank {rank} decided {decision}, rank 0 decided {decisions[0]}; no rank ran the step"
            )
    return decisions[0]
