"""What a scorer returns, and the part of a response that counts as the answer."""

from __future__ import annotations

from dataclasses import dataclass

_OPENED, _CLOSED = "<think>", "</think>"


@dataclass(frozen=True)
class Grade:
    """A score in [0, 1]; whether an answer was found at all, and which; and what else a report should count."""

    score: float
    parsed: bool
    answer: str = ""
    note: str = ""


def stated(response: str) -> str:
    """The response after its reasoning, where a server leaves that in; empty where the reasoning never ends."""
    if _CLOSED in response:
        return response.rpartition(_CLOSED)[2]
    return "" if response.lstrip().startswith(_OPENED) else response
