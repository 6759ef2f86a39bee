"""Schedules of requests that an engine must survive: what one request sees must not depend on the others.

Each scenario plays a schedule on the candidate and compares named requests with the same requests in another schedule
of the same arm. Where the steps of a request have the same shapes in both, its bits must be the same; elsewhere
(other chunks, other batch bins, recomputation, drafts) both are valid roundings of one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from validation.targets.schedule import NO_DRAFTS, Abort, Event, Preempt, Run, Schedule, Submit

Texts = Sequence[Sequence[int]]
"""Windows of real text as tokens, each longer than any request."""

TEXT_LENGTH = 176
"""Tokens of a window: the longest prompt and its continuation."""

TEXTS = 6
"""Windows that a scenario may use."""


@dataclass(frozen=True)
class Comparison:
    """Requests of `judged` against their namesakes in `references`, bit for bit where `exact`.

    With `again` the judged schedule is played a second time, although a reference is the same one.
    """

    judged: Schedule
    references: tuple[Schedule, ...]
    requests: tuple[str, ...]
    exact: bool
    again: bool = False


def request(name: str, text: Sequence[int], prompt: int, tokens: int, accepted: tuple[int, ...] = ()) -> Submit:
    """The first `prompt` tokens of a text, and `tokens` more that follow."""
    return Submit(name, tuple(text[:prompt]), tuple(text[prompt : prompt + tokens]), accepted)


def alone(submit: Submit, options: Schedule) -> Schedule:
    """The request by itself, under the same options; without drafts, without poison."""
    return replace(options, events=(replace(submit, accepted=()), Run()), max_batch=1, drafts=0, poisoned=False)


def _solos(options: Schedule, *events: Event, exact: bool = False) -> Comparison:
    """Every request of these events, aborted ones aside, against itself alone."""
    gone = {event.request for event in events if isinstance(event, Abort)}
    submits = [event for event in events if isinstance(event, Submit) and event.request not in gone]
    references = tuple(alone(submit, options) for submit in submits)
    return Comparison(replace(options, events=events), references, tuple(s.request for s in submits), exact)


def slot_reuse(texts: Texts) -> list[Comparison]:
    """The second owner of a slot and of its pages, against the first owner of fresh ones."""
    options = Schedule((), max_batch=1)
    second = request("second", texts[1], 24, 6)
    events = (request("first", texts[0], 40, 4), Run(), second, Run())
    return [Comparison(replace(options, events=events), (alone(second, options),), ("second",), True)]


def poison(texts: Texts) -> list[Comparison]:
    """Three requests (a padded bin of four) on caches full of NaN, against caches of zeros."""
    submits = tuple(request(f"r{i}", texts[i], 20 + 7 * i, 5) for i in range(3))
    events: tuple[Event, ...] = (*submits, Run())
    clean = Schedule(events, max_batch=3)
    return [Comparison(replace(clean, poisoned=True), (clean,), ("r0", "r1", "r2"), True)]


def companions(texts: Texts) -> list[Comparison]:
    """A request among others, against itself among others of another length and content, in other slots."""
    own = request("own", texts[0], 24, 6)

    def among(text: Sequence[int], prompt: int) -> Schedule:
        mates = (request("mate", text, prompt, 12), Run(2), request("other", text[3:], prompt - 9, 12), Run(2))
        return Schedule((*mates, own, Run()), prefill_chunk=176)

    return [Comparison(among(texts[1], 24), (among(texts[2], 150),), ("own",), True)]


def one_token_prompts(texts: Texts) -> list[Comparison]:
    """Prompts of one token, two at once, after another request has decoded."""
    options = Schedule((), max_batch=2)
    first, second = request("first", texts[1], 1, 5), request("second", texts[2], 1, 5)
    fresh = replace(options, events=(first, second, Run()))
    used = replace(options, events=(request("before", texts[0], 30, 4), Run(), first, second, Run()))
    return [Comparison(used, (fresh,), ("first", "second"), True), _solos(options, first, second, Run())]


def warm_prefix(texts: Texts) -> list[Comparison]:
    """Hits at a boundary, in the middle, on part of a longer prompt; a prompt of the same length, and one whose second
    block alone is a cached one's: against cold."""
    options = Schedule((), max_batch=2, prefix_snapshots=8)
    text, other = texts[0], texts[1]
    mixed, late = [*text[:70], *other[70:]], [*texts[2][:64], *text[64:]]
    warm = (
        request("again", text, 130, 4),
        request("boundary", text, 128, 3),
        request("part", mixed, 130, 3),
        request("stranger", other, 130, 3),
        request("late", late, 130, 3),
    )
    events = (request("cold", text, 130, 4), Run(), *(event for submit in warm for event in (submit, Run())))
    references = tuple(alone(submit, options) for submit in warm)
    return [Comparison(replace(options, events=events), references, tuple(s.request for s in warm), True)]


def page_pressure(texts: Texts) -> list[Comparison]:
    """A cached prefix while others take every free page, against cold."""
    options = Schedule((), max_batch=2, prefix_snapshots=2, pages=13)
    again = request("again", texts[0], 66, 4)
    fillers = (request("left", texts[1], 58, 5), request("right", texts[2], 50, 5))
    events = (request("cold", texts[0], 66, 4), Run(), *fillers, Run(), again, Run())
    return [Comparison(replace(options, events=events), (alone(again, options),), ("again",), True)]


def chunks(texts: Texts) -> list[Comparison]:
    """A prompt in chunks of 1, 7, 16, 17 and 33 tokens, against the whole."""
    own = request("own", texts[0], 50, 4)
    whole = alone(own, Schedule(()))
    return [
        Comparison(alone(own, Schedule((), prefill_chunk=n)), (whole,), ("own",), False) for n in (1, 7, 16, 17, 33)
    ]


def batch_bins(texts: Texts) -> list[Comparison]:
    """A batch that grows to five and shrinks through the bins, with prefill mixed in, against each alone."""
    submits = [request(f"r{i}", texts[i], 18 + 5 * i, 12 - i) for i in range(5)]
    events = [event for submit in submits for event in (submit, Run(2))]
    return [_solos(Schedule((), max_batch=5, prefill_chunk=16), *events, Run())]


def preemption(texts: Texts) -> list[Comparison]:
    """Requests preempted by command and by a lack of pages, against each alone."""
    own, mate = request("own", texts[0], 30, 8), request("mate", texts[1], 21, 10)
    commanded = _solos(Schedule((), max_batch=2), own, mate, Run(4), Preempt("own"), Run(3), Preempt("mate"), Run())
    short = Schedule((), max_batch=2, pages=4)
    return [commanded, _solos(short, request("own", texts[2], 24, 9), request("mate", texts[3], 26, 8), Run())]


def aborts(texts: Texts) -> list[Comparison]:
    """A request in the slot of one that was aborted in its prefill, and of one aborted in its decode."""
    options = Schedule((), max_batch=1, prefill_chunk=16)
    second, third = request("second", texts[1], 24, 4), request("third", texts[2], 24, 4)
    events = (
        *(request("prefilling", texts[0], 60, 4), Run(2), Abort("prefilling"), second, Run()),
        *(request("decoding", texts[3], 20, 9), Run(5), Abort("decoding"), third, Run()),
    )
    references = alone(second, options), alone(third, options)
    return [Comparison(replace(options, events=events), references, ("second", "third"), True)]


def verify_steps(texts: Texts) -> list[Comparison]:
    """Drafts of which 0 to all are right, steps without drafts between, equal and unequal widths, against no drafts."""
    turns = (3, 0, NO_DRAFTS, 2, 1, NO_DRAFTS, 3, 3, 0)
    a, b = request("a", texts[0], 20, 18, turns), request("b", texts[1], 27, 18, turns)
    wide = request("wide", texts[2], 24, 26, (7, 0, NO_DRAFTS, 3, 5))
    ragged = replace(b, accepted=(NO_DRAFTS, 1, 3, 0))
    return [
        _solos(Schedule((), max_batch=2, drafts=3), a, b, Run()),
        _solos(Schedule((), max_batch=1, drafts=7), wide, Run()),
        _solos(Schedule((), max_batch=2, drafts=3), a, Run(3), ragged, Run()),
    ]


def verify_caches(texts: Texts) -> list[Comparison]:
    """With drafts: a slot used again, a prefix whose boundary lies inside a verify step, preemption, poison."""
    turns = (2, 0, 3, 1)
    options = Schedule((), max_batch=1, drafts=3)
    second = request("second", texts[1], 24, 14, turns)
    fresh = replace(options, events=(second, Run()))
    used = replace(options, events=(request("first", texts[0], 30, 16, turns), Run(), second, Run()), poisoned=True)
    hit = replace(options, prefix_snapshots=4)
    again = request("again", texts[2], 70, 6)
    crossing = replace(hit, events=(request("cold", texts[2], 58, 20, turns), Run(), again, Run()))
    stopped = (request("own", texts[3], 20, 16, turns), Run(3), Preempt("own"), Run())
    return [
        Comparison(used, (fresh,), ("second",), True),
        Comparison(crossing, (alone(again, replace(hit, prefix_snapshots=0)),), ("again",), False),
        _solos(options, *stopped),
    ]


def state_hash(texts: Texts) -> list[Comparison]:
    """A hash of all live bytes after every step: a busy schedule and its rerun; a request that verifies drafts in other
    company and other slots; one that was preempted where its resumption repeats the same steps, against one that was
    not: between chunks of its prompt, and at the boundary of a cached prefix."""
    turns = (3, 0, NO_DRAFTS, 2, 1)
    a, b, c = (request(name, texts[i], 20 + 9 * i, 14, turns) for i, name in enumerate("abc"))
    options = Schedule((), max_batch=2, drafts=3, prefill_chunk=16, prefix_snapshots=4, hash_states=True)
    busy = replace(options, events=(a, Run(2), b, Run(4), Preempt("a"), c, Run()))
    own, before = (
        request("own", texts[0], 20, 14, turns),
        (request("x", texts[3], 17, 2), request("y", texts[4], 17, 4)),
    )
    company = replace(options, events=(request("mate", texts[1], 33, 14, turns), own, Run()))
    other = (*before, Run(), request("mate", texts[2], 33, 14, turns), own, Run())
    single = Schedule((), max_batch=1, prefill_chunk=16, hash_states=True)
    long = request("long", texts[2], 34, 3)
    cached = Schedule((), max_batch=1, prefix_snapshots=2, hash_states=True)
    whole = request("whole", texts[5], cached.prefix_block, 3)
    return [
        Comparison(busy, (busy,), ("a", "b", "c"), True, again=True),
        Comparison(replace(options, events=other), (company,), ("own",), True),
        _stopped(single, long, Run(2)),
        _stopped(cached, whole, Run(1)),
    ]


def _stopped(options: Schedule, submit: Submit, first: Run) -> Comparison:
    """The request preempted after its first steps, against the same one left alone; bit for bit."""
    through = replace(options, events=(submit, Run()))
    stopped = replace(options, events=(submit, first, Preempt(submit.request), Run()))
    return Comparison(stopped, (through,), (submit.request,), True)


SCENARIOS: dict[str, Callable[[Texts], list[Comparison]]] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (
        slot_reuse,
        poison,
        companions,
        one_token_prompts,
        warm_prefix,
        page_pressure,
        chunks,
        batch_bins,
        preemption,
        aborts,
        verify_steps,
        verify_caches,
        state_hash,
    )
}
"""The scenarios by name, as profiles list them."""
