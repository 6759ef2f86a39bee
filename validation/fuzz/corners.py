"""Cases by hand that a search plays before it draws any: corners which random schedules reach late or never.

Each is the least case of a public bug's kind. A new one belongs here when a fault needed luck to be found.
"""

from __future__ import annotations

from collections.abc import Iterator

from validation.fuzz.case import LONGEST_PROMPT, MOST_TOKENS, Arrive, Case, Steps, Take

ENOUGH = Steps(20)
"""So many steps that the request before them has ended."""


def corners() -> Iterator[tuple[str, Case]]:
    """Named cases, cheapest first."""
    shared = Arrive(0, 40, 2), ENOUGH, Arrive(1, 20, 4)
    yield "a prompt that shares one block of a longer cached one", Case(shared, prefix_snapshots=8)
    stranger = Arrive(0, 33, 2), ENOUGH, Arrive(3, 33, 4)
    yield "a prompt of a cached one's length", Case(stranger, prefix_snapshots=8)
    ones = Arrive(3, 12, 4), ENOUGH, Arrive(0, 1, 4), Arrive(2, 1, 4)
    yield "two prompts of one token at once, after another request", Case(ones, max_batch=2)
    yield "a decode on the last page", Case((Arrive(0, LONGEST_PROMPT, MOST_TOKENS),), max_batch=1)
    left = Arrive(0, 12, 6), Arrive(3, 14, 6), Arrive(2, 10, 4), Steps(3), Take("abort", 0)
    yield "an abort beside a request that runs and one that waits", Case(left, max_batch=2)
    joined = Arrive(0, 12, 6), Arrive(3, 14, 6), Steps(2), Arrive(2, 40, 3)
    yield "a long prompt that joins two requests as they decode", Case(joined, max_batch=3, prefill_chunk=16)
    inside = Arrive(0, 29, 10, (3,)), ENOUGH, Arrive(0, 40, 3)
    yield "a prefix block that ends inside a verify step", Case(inside, max_batch=2, prefix_snapshots=8, drafts=3)
    drafting = tuple(Arrive(text, 1, 9, (3, 1)) for text in (0, 2, 3))
    yield "verify steps with a null request", Case(drafting, max_batch=3, drafts=3, poisoned=True)
    dealt = Arrive(0, 30, 6), Steps(2), Arrive(3, 33, 5), ENOUGH, Arrive(0, 36, 4)
    yield "contexts dealt out to two ranks", Case(dealt, prefix_snapshots=4, context_ranks=2)
