"""A script of requests for an engine, and what came of it. Gates write schedules; a target plays them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


NO_DRAFTS = -1
"""In `Submit.accepted`: this step of the request has no drafts."""


@dataclass(frozen=True)
class Submit:
    """Queue a request. Its tokens are given, whatever the logits say: `continuation` follows the prompt.

    With speculation, `accepted` says for every decode step in turn (cyclically) how many of its drafts are right, the
    others being wrong on purpose; NO_DRAFTS for a step without drafts.
    """

    request: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """Run so many steps, or with None until every request has ended."""

    steps: int | None = None


@dataclass(frozen=True)
class Preempt:
    """Take everything from a running request; it is resumed later."""

    request: str


@dataclass(frozen=True)
class Abort:
    """End a request where it stands."""

    request: str


Event = Submit | Run | Preempt | Abort


@dataclass(frozen=True)
class Schedule:
    """Events in order, on an engine with these options. Sequences of an engine start with empty caches.

    `poisoned` fills every slot and page that a request can own with NaN first. `lenient`: a Preempt or an Abort that
    comes when its request does not run, or has ended, is passed over; otherwise the engine refuses it. `verify_caches`
    keeps the caches after every verify step, `hash_states` a hash of them after every step.
    """

    events: tuple[Event, ...]
    max_batch: int = 4
    pages: int | None = None
    prefill_chunk: int = 64
    prefix_block: int = 64
    prefix_snapshots: int = 0
    drafts: int = 0
    poisoned: bool = False
    lenient: bool = False
    verify_caches: bool = False
    hash_states: bool = False


@dataclass(frozen=True)
class Trace:
    """What one request saw. `logits` f32 [m, V]: row i predicted token i of the continuation; fewer if it was aborted.

    `after_prompt` and `at_end` are the request's caches when its first token is due and when its last one is, by the
    names of `ForcedDecode.state`; empty where it did not come so far. `error` is the engine's, if it ended in one.
    `tokens` is what the engine committed for the request, which may be one more than was given. `after_verify` has the
    caches right after every verify step, by the number of tokens that they cover, where the schedule asks for them.

    `state_hashes` has, where the schedule asks for them, SHA-256 hashes of every byte that later steps read, as it is
    stored, by the number of tokens covered (the last one where tokens were computed twice). Their order: that number;
    of every layer with a recurrent state, and every rank of it, the convolution window and the state; of every layer
    with a latent cache its rows in the order of tokens.
    """

    logits: Tensor
    after_prompt: Mapping[str, Tensor] = field(default_factory=dict)
    at_end: Mapping[str, Tensor] = field(default_factory=dict)
    error: str = ""
    tokens: tuple[int, ...] = ()
    after_verify: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    state_hashes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Played:
    """A played schedule: traces by request, and how often each contract was broken.

    `broken` counts by contract: words of the caches outside the step's own slots and positions that changed; words of
    null slots and the null page that are not zero; slots with two owners, or out of range; slots and pages that nobody
    owns at the end and that were not given back, or were given back twice; verify steps that did not accept as many
    drafts as are right.
    """

    traces: Mapping[str, Trace]
    broken: Mapping[str, int]
