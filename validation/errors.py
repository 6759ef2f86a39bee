"""Errors that a person can mend: one line that says what was given, what is allowed and what to do."""

from __future__ import annotations

_LONGEST = 4000


class UsageError(ValueError):
    """Wrong usage or bad input. The command line prints the message as one line and exits with code 2."""


class MachineryError(RuntimeError):
    """What a command stands on failed, such as git. The command line prints one line and exits with code 4."""


class RunInterrupted(Exception):
    """A run was stopped from outside with everything measured so far kept; the message says how to resume it."""


def one_line(text: object) -> str:
    """`text` as one printable line: white space and control characters become single spaces, a long text is cut."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4].rstrip() + " ..."


def describe(error: BaseException) -> str:
    """An exception as one line: its type and its text."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
