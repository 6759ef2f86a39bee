"""One request of an engine: what was asked, what came of it, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from decode_impl.sampling import SamplingParams


class RequestError(ValueError):
    """A request that this engine can never run, or that it does not know."""


class Finish(StrEnum):
    """Why a request ended; an error's text is in `Request.error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass
class Request:
    """One request: its prompt, what it has generated, and where it stands.

    `computed` counts tokens in the caches. `slot` is the first of the request's state slots and `column` says which of
    them holds the state after `computed` tokens. `drafts` are guesses at what follows, not yet verified;
    `verify_steps` has (place, drafts, accepted) of every step that verified some.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_tokens: frozenset[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = 0
    column: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_distributions: list[Tensor] = field(default_factory=list)
    verify_steps: list[tuple[int, int, int]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    @property
    def running(self) -> bool:
        """True while the request owns a slot."""
        return self.slot != 0
