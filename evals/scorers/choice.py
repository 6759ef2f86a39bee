"""A multiple-choice letter: the last one that the response states as its answer."""

from __future__ import annotations

import re
import unicodedata

from evals.scorers.grade import Grade, stated

WINDOW = 4096
"""Characters at the end of a response in which the answer is looked for: it comes last."""

# Every repetition is bounded, so the time is linear in the window, whatever it holds.
_MARKS = r"[\s*_$:({\[\"'`]"
_FONT = r"\\(?:boxed|text|mathrm|textbf|mathbf)\{"
_OPENING = (
    rf"{_MARKS}{{0,8}}(?:(?i:option|choice){_MARKS}{{1,4}})?(?:\\[(\[]\s{{0,2}})?(?:{_FONT}){{0,2}}{_MARKS}{{0,4}}"
)
_SECOND = (
    r"[)\]}*_$.\s\"'`]{0,4}(?:\\text\{\s?)?(?:and/or|or|and|OR|AND|vs\.?|[/,;&|+])(?:\s{1,3}(?i:maybe|perhaps|possibly))?"
    r"[\s({\[*_$}\"'`]{0,4}[A-D](?![A-Za-z])"
)
_STATED = re.compile(rf"(?:(?i:\banswer\b[\s*_]{{0,4}}(?:is|:|=))|\\boxed\{{){_OPENING}([A-D])(?![A-Za-z])({_SECOND})?")
_ALONE = re.compile(r"\s{0,9}[({\[*]{0,3}([A-D])[)}\]*]{0,3}\.?\s{0,9}")


def letter(response: str) -> str | None:
    """The letter of the last statement like `answer: C`, `the answer is (C)` or `\\boxed{C}`, or of a bare letter.

    Where the last statement names two letters there is none. Full-width letters and colons are read as plain ones.
    """
    text = unicodedata.normalize("NFKC", stated(response)[-WINDOW:])
    if alone := _ALONE.fullmatch(text):
        return alone[1]
    found = [(match[1], match[2]) for match in _STATED.finditer(text)]
    return found[-1][0] if found and not found[-1][1] else None


def grade(response: str, expected: str) -> Grade:
    """1 where the stated letter is the expected one."""
    given = letter(response)
    return Grade(float(given == expected), parsed=given is not None, answer=given or "")
