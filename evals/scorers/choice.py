"""A multiple-choice letter: the last one that the response states as its answer."""

from __future__ import annotations

import re

from evals.scorers.grade import Grade, stated

WINDOW = 4096
"""Characters at the end of a response in which the answer is looked for: it comes last."""

# Every repetition is bounded, so the time is linear in the window, whatever it holds.
_OPENING = r"[\s*_$:({\[]{0,8}(?:\\boxed\{|\\text\{|\\mathrm\{|\\textbf\{){0,2}[\s*_$({\[]{0,4}"
_STATED = re.compile(
    r"(?:(?i:\banswer\b[\s*_]{0,4}(?:is|:|=))|\\boxed\{)" + _OPENING + r"([A-D])(?![A-Za-z])"
    r"(?![)\]}*_$.\s]{0,4}(?:or|and|/|,)[\s({\[*_]{0,4}[A-D](?![A-Za-z]))"
)
_ALONE = re.compile(r"\s{0,9}[({\[*]{0,3}([A-D])[)}\]*]{0,3}\.?\s{0,9}")


def letter(response: str) -> str | None:
    """The letter of the last statement like `answer: C`, `the answer is (C)` or `\\boxed{C}`, or of a bare letter.

    A statement that names two letters is none.
    """
    text = stated(response)[-WINDOW:]
    if alone := _ALONE.fullmatch(text):
        return alone[1]
    found = [match[1] for match in _STATED.finditer(text)]
    return found[-1] if found else None


def grade(response: str, expected: str) -> Grade:
    """1 where the stated letter is the expected one."""
    given = letter(response)
    return Grade(float(given == expected), parsed=given is not None, answer=given or "")
