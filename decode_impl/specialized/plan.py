"""The routing decision of a step: specialised, or generic with a named reason.

Every predicate is a function of values that all ranks share, so that no rank can take another path than its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from decode_impl.batch import Chunk
from decode_impl.parallel.errors import RankDisagreed
from decode_impl.parallel.protocol import slot
from decode_impl.specialized.contract import MAX_DRAFTS, MAX_ROWS, MIN_DRAFTS, batch_bin


class Fallback(StrEnum):
    """Why a step runs generic although the specialised path is on."""

    EMPTY = "no rows"
    PREFILL = "prefill only"
    MIXED = "prefill mixed with decode"
    FIRST_TOKEN = "one-token prompt: no decode state yet"
    TOO_MANY_ROWS = f"more than {MAX_ROWS} rows"
    VERIFY_MIXED = "verify mixed with other chunks"
    RAGGED_VERIFY = "verify steps of different widths"
    DRAFT_COUNT = f"drafts outside {MIN_DRAFTS}..{MAX_DRAFTS}"
    ALL_LOGITS = "logits of prompt tokens wanted"
    MISSING_GRAPH = "no graph was captured for this shape"


@dataclass(frozen=True)
class Decision:
    """Where a step goes. `bin` is its padded row count on the specialised path; a generic step may have a `reason`."""

    bin: int | None
    reason: Fallback | None

    @property
    def specialized(self) -> bool:
        """True where the specialised path runs."""
        return self.bin is not None


def plan(chunks: Sequence[Chunk], all_logits: bool = False) -> Decision:
    """Decide for one step, from the shapes of its chunks alone.

    A one-token chunk that begins its request is a prefill, however much it looks like a decode row.
    """
    reason = Fallback.EMPTY if not chunks else Fallback.ALL_LOGITS if all_logits else None
    if not reason:
        reason = _verify_reason(chunks) if any(chunk.verifies for chunk in chunks) else _decode_reason(chunks)
    rows = sum(len(chunk.tokens) for chunk in chunks)
    if not reason and rows > MAX_ROWS:
        reason = Fallback.TOO_MANY_ROWS
    return Decision(None, reason) if reason else Decision(batch_bin(rows), None)


def _decode_reason(chunks: Sequence[Chunk]) -> Fallback | None:
    decode = sum(len(chunk.tokens) == 1 and chunk.start > 0 for chunk in chunks)
    if decode == len(chunks):
        return None
    if decode:
        return Fallback.MIXED
    return Fallback.FIRST_TOKEN if all(len(chunk.tokens) == 1 for chunk in chunks) else Fallback.PREFILL


def _verify_reason(chunks: Sequence[Chunk]) -> Fallback | None:
    if not all(chunk.verifies for chunk in chunks):
        return Fallback.VERIFY_MIXED
    widths = {len(chunk.tokens) for chunk in chunks}
    if len(widths) > 1:
        return Fallback.RAGGED_VERIFY
    return None if MIN_DRAFTS <= widths.pop() - 1 <= MAX_DRAFTS else Fallback.DRAFT_COUNT


def require_agreement(decisions: Sequence[Decision], step: int = 1) -> Decision:
    """The decision that all ranks took about the engine's `step`-th step.

    Raises:
        RankDisagreed: some rank decided otherwise; the first such rank is named. No rank ran the step.
    """
    for rank, decision in enumerate(decisions):
        if decision != decisions[0]:
            why = f"decided {decision}, rank 0 decided {decisions[0]}; no rank ran the step"
            raise RankDisagreed(why, rank=rank, slot=slot(step), epoch=step, source=0)
    return decisions[0]
