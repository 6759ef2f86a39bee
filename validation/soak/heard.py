"""What was heard of a server for one canary, and how two hearings differ."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.samples import Response

_SHOWN = 24
"""Characters of a text that are quoted around its first difference."""


@dataclass(frozen=True)
class Heard:
    """Text, reason of its end, error, and logarithms of probabilities; empty where the server gives none.

    `logs` holds them in the server's order: those of the text's tokens, and of the likeliest beside each; or of the
    whole vocabulary at every place of given tokens.
    """

    text: str = ""
    finish: str = ""
    error: str = ""
    logs: tuple[float, ...] = ()

    def same_text(self, other: Heard) -> bool:
        """Whether text and end agree."""
        return (self.text, self.finish) == (other.text, other.finish)

    def same_bits(self, other: Heard) -> bool:
        """Whether every logarithm agrees in its bits."""
        return _bits(self.logs) == _bits(other.logs)


def heard_of(response: Response) -> Heard:
    """What a reply of either dialect amounts to."""
    return Heard(response.text, response.finish_reason, response.error, tuple(_logs(response.raw or {})))


def difference(references: Sequence[Heard], again: Heard, bits: bool) -> str:
    """How `again` differs from each of its references, told of the first; nothing where it is one of them.

    With `bits` logarithms must agree too.
    """
    if any(again.same_text(one) and (not bits or again.same_bits(one)) for one in references):
        return ""
    alike = [one for one in references if again.same_text(one)]
    if not alike:
        return _text_difference(references[0], again)
    return f"the same text from other log-probabilities ({log_difference(alike[0], again)})"


def log_difference(one: Heard, other: Heard) -> str:
    """How far two hearings of one text are apart in their logarithms."""
    if len(one.logs) != len(other.logs):
        return f"{len(other.logs)} of them, there were {len(one.logs)}"
    pairs = zip(one.logs, other.logs, strict=True)
    largest = max((abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)), default=0.0)
    count = sum(a != b for a, b in zip(_bits(one.logs), _bits(other.logs), strict=True))
    return f"{count} of {len(one.logs)} differ, by up to {largest:.3g}"


def _text_difference(one: Heard, other: Heard) -> str:
    if other.error or one.error:
        return f"it ended as {other.error or 'an answer'!r}, before as {one.error or 'an answer'!r}"
    place = next((i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), None)
    if place is None and len(one.text) == len(other.text):
        return f"it ended by {other.finish!r}, before by {one.finish!r}"
    place = min(len(one.text), len(other.text)) if place is None else place
    now, before = (ascii(text[place : place + _SHOWN]) for text in (other.text, one.text))
    return f"its text from character {place} on is {now}, it was {before}"


def _logs(raw: Mapping[str, Any]) -> Iterator[float]:
    """Log-probabilities of a chat (`content`) or a completion (`token_logprobs`), whatever else the reply is."""
    choices = raw.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    told = choice.get("logprobs")
    if not isinstance(told, dict):
        return
    for token in told["content"] if isinstance(told.get("content"), list) else []:
        if isinstance(token, dict):
            beside = token.get("top_logprobs")
            for entry in (token, *(beside if isinstance(beside, list) else ())):
                yield from _number(entry.get("logprob") if isinstance(entry, dict) else None)
    for value in told["token_logprobs"] if isinstance(told.get("token_logprobs"), list) else []:
        yield from _number(value)
    for step in told["top_logprobs"] if isinstance(told.get("top_logprobs"), list) else []:
        for name in sorted(step) if isinstance(step, dict) else []:
            yield from _number(step[name])


def _number(value: Any) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _bits(values: Sequence[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]
