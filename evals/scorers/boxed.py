"""A boxed number or expression: the last `\\boxed{...}` counts, and equal values are equal however they are written."""

from __future__ import annotations

import re

from evals.scorers.grade import Grade, stated
from evals.scorers.mathematics import equal

LONGEST = 400
"""Characters of a boxed answer that are read; no answer of a contest is longer, and a loop boxes megabytes."""

_BOX = "\\boxed"
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3}){1,5}")


def last_boxed(text: str) -> str | None:
    """What the last box holds, braces matched; None where there is no box, or none that ends within `LONGEST`."""
    place = text.rfind(_BOX)
    # A model that repeats what it was told to do ends with an empty box, which states nothing.
    if place >= 0 and text.startswith(_BOX + "{}", place):
        place = text.rfind(_BOX, 0, place)
    if place < 0:
        return None
    window = text[place + len(_BOX) : place + len(_BOX) + LONGEST].lstrip(" ")
    if not window.startswith("{"):
        return None
    depth = 0
    for i, character in enumerate(window):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return window[1:i].strip().strip("$").strip()
    return None


def integer(text: str) -> int | None:
    """The integer that a text plainly is, thousands separated or not; None for anything else."""
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[^0-9]", "", text)
    return int(text) if _INTEGER.fullmatch(text) else None


def grade(response: str, expected: str) -> Grade:
    """1 where the last box holds the expected value; an empty or endless box is no answer."""
    found = last_boxed(stated(response))
    if not found:
        return Grade(0.0, parsed=False)
    wanted, given = integer(expected.strip()), integer(found)
    if wanted is not None and given is not None:
        return Grade(float(wanted == given), parsed=True, answer=str(given))
    verdict = equal(found, expected)
    if verdict is None:
        return Grade(0.0, parsed=False, answer=found, note="not understood in time")
    return Grade(float(verdict), parsed=True, answer=found)
