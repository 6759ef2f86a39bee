"""Every verify step there is: each number of drafts with each number of them accepted, in sequence and alone."""

from __future__ import annotations

from collections.abc import Iterator

from validation.fuzz.case import MOST_BATCH, MOST_TOKENS, Arrive, Case
from validation.targets.schedule import NO_DRAFTS

DRAFTS = (3, 4, 5, 6, 7)
"""Drafts that the specialised path verifies."""


def verify_cases() -> Iterator[tuple[str, Case]]:
    """Named cases: one request for every number of right drafts, all in one batch.

    Prompts of one token begin together, so that verify steps are of one width and run specialised; longer prompts come
    one after another, cross a page boundary, and verify every other step: what a step without drafts reads is what the
    verify step before it left.
    """
    for drafts in DRAFTS:
        together = tuple(Arrive(n % 5, 1, MOST_TOKENS, (n,)) for n in range(drafts + 1))
        apart = tuple(Arrive(n % 5, 13, MOST_TOKENS - n, (n, NO_DRAFTS)) for n in range(drafts + 1))
        yield f"{drafts} drafts", Case(together, max_batch=MOST_BATCH, drafts=drafts, poisoned=True)
        yield f"{drafts} drafts every other step", Case(apart, max_batch=MOST_BATCH, drafts=drafts, poisoned=True)
