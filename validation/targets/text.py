"""Text that a target generates, with what a gate wants to know of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ask:
    """A prompt to continue. `seed` draws the text where the temperature is above 0, and is of this ask alone."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class VerifyStep:
    """One verify step of a request: the place of its first token, drafts made and drafts accepted."""

    place: int
    drafts: int
    accepted: int


@dataclass(frozen=True)
class Answer:
    """What came of an ask. `finish` is stop, length or error; `error` is the engine's reason then.

    `entropies` has the entropy in nats of every token's distribution at temperature 1. `state_norms` maps a place to
    the norm of the request's whole recurrent state after so many tokens. `used` is what the engine says that it used,
    by the keys of `evals.samples.ECHOED` and `SHARED`.
    """

    tokens: tuple[int, ...]
    finish: str
    error: str
    entropies: tuple[float, ...]
    verify_steps: Sequence[VerifyStep]
    state_norms: dict[int, float]
    used: Mapping[str, int | float | str] = field(default_factory=dict)
