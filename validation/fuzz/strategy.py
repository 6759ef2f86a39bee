"""How cases are drawn: hypothesis strategies over lists of operations.

A list of plain operations, and not a stateful machine of rules: a target plays a whole schedule at once, so there is no
live engine whose state could choose the next rule; operations that do not apply are passed over, so that any part of a
list is a list again. That is what makes shrinking good: hypothesis deletes and lowers parts at will, and never has to
find out which rules a deletion has made impossible.
"""

from __future__ import annotations

from hypothesis import strategies as st

from validation.fuzz.case import HOW, LEAST_PAGES, LONGEST_PROMPT, MOST_TOKENS, Arrive, Case, Operation, Steps, Take
from validation.fuzz.texts import TEXTS
from validation.targets.schedule import NO_DRAFTS

_MOST_DRAWN = 16

_PROMPTS = st.one_of(
    st.sampled_from((1, 17, 33, 12, 28, 18, 49, 2, 16, 32)),
    st.sampled_from((12, 14, 17, 20)),
    st.integers(1, LONGEST_PROMPT),
)
"""One-token prompts, lengths at page and prefix boundaries and a few tokens before them, and any other."""

_TEXTS = st.sampled_from((0, 0, 0, 0, 0, *range(1, TEXTS)))
"""More than half of the requests continue one text, so that prefixes hit."""

_ACCEPTED = st.lists(st.sampled_from((0, NO_DRAFTS, 1, 2, 3, 2, 7)), max_size=4).map(tuple)
_TOKENS = st.one_of(st.sampled_from((MOST_TOKENS, 11, 8)), st.integers(1, MOST_TOKENS))

_ARRIVALS = st.builds(Arrive, _TEXTS, _PROMPTS, _TOKENS, _ACCEPTED)
_STEPS = st.builds(Steps, st.sampled_from((1, 2, 3, 5, 8, 20)))
"""A few steps, or enough for most requests to end: the next one finds what they left."""

_TAKES = st.builds(Take, st.sampled_from(HOW), st.integers(0, 7))

_OPERATIONS: st.SearchStrategy[Operation] = st.one_of(_ARRIVALS, _ARRIVALS, _STEPS, _STEPS, _TAKES)


_COMPANY = st.tuples(_ARRIVALS, st.lists(_OPERATIONS, min_size=3, max_size=_MOST_DRAWN - 1)).map(
    lambda drawn: (drawn[0], *drawn[1])
)
"""Anything in any order, from a first arrival on."""

_TURNS = st.lists(st.tuples(_TOKENS, st.integers(1, 9), _ACCEPTED), min_size=2, max_size=5)


def _conversation(start: int, turns: list[tuple[int, int, tuple[int, ...]]]) -> tuple[Operation, ...]:
    """Every turn's prompt is the one before with its answer and a few tokens more, once that has ended."""
    operations: list[Operation] = []
    for tokens, more, accepted in turns:
        if start <= LONGEST_PROMPT:
            operations += [Arrive(0, start, tokens, accepted), Steps(20)]
        start += tokens + more
    return tuple(operations)


_CONVERSATIONS = st.builds(_conversation, st.integers(1, 30), _TURNS)


def cases() -> st.SearchStrategy[Case]:
    """Cases of up to 16 operations: two thirds requests in company, one third conversations."""
    return st.builds(
        Case,
        st.one_of(_COMPANY, _COMPANY, _CONVERSATIONS),
        max_batch=st.sampled_from((3, 5, 2, 1, 3)),
        pages=st.one_of(st.none(), st.integers(LEAST_PAGES, LEAST_PAGES + 4)),
        prefill_chunk=st.sampled_from((64, 16, 5, 1)),
        prefix_block=st.sampled_from((16, 32)),
        prefix_snapshots=st.sampled_from((4, 0, 8, 2)),
        drafts=st.sampled_from((0, 3, 0, 3, 0, 4, 5, 6, 7)),
        poisoned=st.booleans(),
        context_ranks=st.sampled_from((1, 1, 1, 1, 1, 1, 1, 2)),
    )
