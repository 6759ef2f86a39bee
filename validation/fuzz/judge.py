"""What must hold of a played case, however it is composed; a breach is one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from numerics.logits import centred_logit_rms
from validation.fuzz.case import Arrive, Case
from validation.fuzz.solo import Caches, Reference, Solo, distance
from validation.gates.parity.judge import CACHE_MULTIPLE, FLIP_SIGMAS
from validation.gates.parity.measure import STATE_KINDS
from validation.gates.parity.schedule_judge import CACHE_RESOLUTION, SCHEDULE_MULTIPLE, SINGLE_MULTIPLE
from validation.targets.schedule import Played, Trace


def breaches(case: Case, played: Played, reference: Reference) -> Iterator[str]:
    """Contracts of the caches, and of every request its tokens, its logits and its caches against its solo run.

    The allowances are those of the parity gate's schedules; the noise is that of all texts, the largest there is.
    """
    for contract, count in played.broken.items():
        if count:
            yield f"contract '{contract}' is broken {count} times, 0 are allowed"
    aborted = case.aborted()
    for number, arrival in enumerate(case.arrivals()):
        name = f"r{number}"
        for message in _request(arrival, played.traces[name], reference, number in aborted):
            yield f"request {name} (text {arrival.text}, prompt {arrival.prompt}): {message}"


def _request(arrival: Arrive, trace: Trace, reference: Reference, aborted: bool) -> Iterator[str]:
    text, solo = reference.texts[arrival.text], reference.solos[arrival.text]
    given = tuple(text[arrival.prompt : arrival.prompt + arrival.tokens])
    own = trace.tokens[: len(given)]
    rows = len(trace.logits)
    if trace.error:
        yield f"ended in an error: {trace.error}"
    elif rows < len(given) and not aborted:
        yield f"{len(given) - rows} of {len(given)} tokens were never predicted"
    elif own != given[: len(own)]:
        wrong = next(i for i, pair in enumerate(zip(own, given, strict=False)) if pair[0] != pair[1])
        yield f"token {wrong} is {own[wrong]}, its text has {given[wrong]}{_whose(own[wrong], arrival, reference)}"
    elif rows:
        yield from _text(trace.logits, solo.logits[arrival.prompt - 1 :][:rows], arrival, reference)
        if rows == len(given) and not aborted:
            yield from _unseen(arrival, trace)
        yield from _caches(arrival, trace, solo, reference)


def _unseen(arrival: Arrive, trace: Trace) -> Iterator[str]:
    """Caches that a request which got all its tokens must have shown; a single token is due right after the prompt."""
    for when, caches in (("after the prompt", trace.after_prompt), ("at the end", trace.at_end)):
        if not caches and (when == "after the prompt" or arrival.tokens > 1):
            yield f"its caches {when} were not there to be looked at: it ended before"


def _whose(token: int, arrival: Arrive, reference: Reference) -> str:
    owners = [i for i, text in enumerate(reference.texts) if token in text and i != arrival.text]
    return f", a word of text {owners[0]}" if owners else ""


def _text(logits: Tensor, solo: Tensor, arrival: Arrive, reference: Reference) -> Iterator[str]:
    """Greedy text equal but for ties, every row of logits within the noise; the first place that is not is named."""
    differences = centred_logit_rms(solo, logits).tolist()
    margin = FLIP_SIGMAS * CACHE_MULTIPLE * reference.logit_floor
    allowed = SINGLE_MULTIPLE * reference.logit_floor
    chosen, best = logits.argmax(-1).tolist(), solo.argmax(-1).tolist()
    for i, difference in enumerate(differences):
        lead = float(solo[i, best[i]] - solo[i, chosen[i]])
        if lead <= margin and difference <= allowed:
            continue
        whose = _belongs(logits[i], arrival, i, reference)
        if lead > margin:
            tie = f"a tie is {margin:.3g}"
            yield f"greedy token {i} is {chosen[i]}, alone {best[i]} by {lead:.3g} logits ({tie}){whose}"
        else:
            bound = f"allowed {allowed:.3g}{whose}"
            yield f"logits of token {i} differ from the solo run's by {difference:.3g} (RMS), {bound}"
        return


def _belongs(row: Tensor, arrival: Arrive, token: int, reference: Reference) -> str:
    """Whose row of logits this is, if it is within the noise itself of another place's."""
    allowed = SCHEDULE_MULTIPLE * reference.logit_floor
    for text, solo in enumerate(reference.solos):
        distances = centred_logit_rms(solo.logits, row.expand_as(solo.logits))
        place = int(distances.nan_to_num(math.inf).argmin())
        if float(distances[place]) <= allowed and (text, place) != (arrival.text, arrival.prompt - 1 + token):
            return f"; they are those of text {text} after {place + 1} tokens"
    return ""


def _caches(arrival: Arrive, trace: Trace, solo: Solo, reference: Reference) -> Iterator[str]:
    """The first cache that is out of bounds: after the prompt, after a verify step, or when the last token is due."""
    seen: list[tuple[str, int, Caches]] = [("after the prompt", arrival.prompt, trace.after_prompt)]
    seen += [(f"after the verify step to {n}", n, caches) for n, caches in trace.after_verify.items()]
    seen.append(("at the end", arrival.prompt + arrival.tokens - 1, trace.at_end))
    for when, length, caches in seen:
        for kind in STATE_KINDS if caches else ():
            difference = _nearest(caches, solo, length, kind)
            allowed = SCHEDULE_MULTIPLE * reference.cache_floor[kind] + CACHE_RESOLUTION
            if not difference <= allowed:
                yield f"{kind} cache {when} differs by {difference:.3g} (relative RMS), allowed {allowed:.3g}"
                return


def _nearest(seen: Caches, solo: Solo, length: int, kind: str) -> float:
    """Distance of a cache from the solo run's. A verify step may end a few tokens past the last given one."""
    rows = next((cache.shape[0] for name, cache in seen.items() if name.endswith(".latent")), length)
    exact = solo.caches.get(max(rows, length))
    return distance(exact, seen, kind) if exact else math.inf
