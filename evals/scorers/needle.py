"""Retrieval by OpenAI MRCR's rule: 0 unless the answer starts with the random string, else similarity of the rest."""

from __future__ import annotations

from difflib import SequenceMatcher

from evals.scorers.grade import Grade, stated

PREFIX = "prefix missing"
"""The note of an answer that does not start with the random string: counted apart from bad copies."""

OVERLONG = "overlong"
"""The note of an answer of which only the first part was compared."""

_TIMES, _ROOM = 8, 2000
"""An answer longer than this many times the right one, and some room, is compared over its first part: matching takes
time in proportion to the product of both. All of its length counts in the ratio, which is below 2/9 either way."""


def grade(response: str, expected: str, prefix: str) -> Grade:
    """Similarity in [0, 1] of the response to `expected` after the prefix; newlines in front of it are no matter."""
    given = stated(response).lstrip("\r\n")
    if not given.startswith(prefix):
        return Grade(0.0, parsed=bool(given.strip()), answer=given[: len(prefix)], note=PREFIX)
    given, right = given[len(prefix) :], expected.removeprefix(prefix)
    longest = _TIMES * len(right) + _ROOM
    matched = sum(block.size for block in SequenceMatcher(None, given[:longest], right).get_matching_blocks())
    size = len(given) + len(right)
    ratio = 2 * matched / size if size else 1.0
    return Grade(ratio, parsed=True, answer=given[:40], note=OVERLONG if len(given) > longest else "")
