"""Verdicts of gates and runs, and the exit codes they become."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """What a gate, or a whole run, concluded."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"


EXIT_USAGE = 2
"""Wrong usage or bad input: nothing was judged."""

_EXIT = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3, Verdict.ERROR: 4, Verdict.SKIPPED: 1}

_BISECT_SKIP = 125


def exit_code(verdict: Verdict, *, bisect: bool = False) -> int:
    """The process exit code of a run: 0 pass, 1 fail, 3 inconclusive, 4 error.

    With `bisect`, the outcomes that `git bisect run` must skip (3 and 4) become 125.
    """
    code = _EXIT[verdict]
    return _BISECT_SKIP if bisect and code in (3, 4) else code


def overall(required: Iterable[Verdict], optional: Iterable[Verdict] = ()) -> Verdict:
    """The verdict of a run from its gates' verdicts, failing closed.

    A required gate that was SKIPPED counts as FAIL; a run in which no required gate passed is never PASS.
    FAIL outranks ERROR, which outranks INCONCLUSIVE: one proven fault decides. An optional gate decides only by FAIL.
    """
    needed = [Verdict.FAIL if v is Verdict.SKIPPED else v for v in required]
    if Verdict.FAIL in needed or Verdict.FAIL in list(optional):
        return Verdict.FAIL
    for verdict in (Verdict.ERROR, Verdict.INCONCLUSIVE):
        if verdict in needed:
            return verdict
    return Verdict.PASS if needed else Verdict.FAIL
