"""The decision on a schedule unit: contracts, bits where they are promised, noise elsewhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.gates.base import Finding, Table

SCHEDULE_MULTIPLE = 2.0
"""Allowed difference of the caches of a unit's typical request (the lower median), in typical floors, in amplitude.

The floor is the distance of two roundings of the baseline, sqrt(2) e for an error of e each. Here two runs of the
candidate are compared, each of which may err twice as much as the baseline: sqrt(2) 2 e, twice the floor."""

SINGLE_MULTIPLE = 6.0 * SCHEDULE_MULTIPLE
"""Allowed difference of a single request's caches, or of a single token's RMS logits, in the largest of the floor's.

Two nearly tied experts may change places between two valid roundings, and whatever the request caches after that
differs by several typical floors: it happens to one request in five, so a floor of six requests may hold no such case.
Six times what a typical request may differ by is beyond that, and a wrong row of a cache or of logits far beyond it."""

CACHE_RESOLUTION = 2.0**-9
"""Half a ULP of BF16, relative: what one rounding may add where the floor has none."""


def schedule_findings(unit: str, result: Mapping[str, Any]) -> Iterator[Finding]:
    """Why the unit fails; nothing where it passes."""
    name = result["schedule"]
    if result["raised"]:
        yield Finding("engine", f"{name}: the candidate's engine raised {result['raised']}", unit)
        return
    for contract, words in result["broken"].items():
        if words:
            yield Finding("caches", f"{name}: contract '{contract}' is broken in {words} words, 0 are allowed", unit)
    for seen in result["requests"]:
        for message in _request_findings(seen, result["floor"]):
            yield Finding("engine", f"{name} {seen['comparison']}, request {seen['request']}: {message}", unit)
    for message in _typical_findings(result):
        yield Finding("caches", f"{name}: {message}", unit)


def _typical_findings(result: Mapping[str, Any]) -> Iterator[str]:
    """Caches of the typical request, over all requests of the unit that are compared within noise."""
    noisy = [seen["caches"] for seen in result["requests"] if "caches" in seen]
    for when, kinds in (noisy[0] if noisy else {}).items():
        for kind in kinds:
            seen = [caches[when][kind] for caches in noisy]
            typical = statistics.median_low(value if math.isfinite(value) else math.inf for value in seen)
            floor = statistics.median_high(result["floor"]["caches"][kind])
            allowed = SCHEDULE_MULTIPLE * floor + CACHE_RESOLUTION
            if not typical <= allowed:
                place = when.replace("_", " ")
                yield f"{kind} caches {place} differ by {typical:.3g} (relative RMS, median), allowed {allowed:.3g}"


def _request_findings(seen: Mapping[str, Any], floor: Mapping[str, Any]) -> Iterator[str]:
    if seen["error"]:
        yield f"ended in an error: {seen['error']}"
    elif seen["lost"] or not seen["rows"]:
        yield f"{seen['lost']} of {seen['rows']} tokens have no counterpart"
    elif seen.get("unseen"):
        yield f"its caches {' and '.join(seen['unseen']).replace('_', ' ')} were not there to be compared"
    elif seen["exact"]:
        if seen["differing"]:
            yield f"{seen['differing']} elements differ in bits from the same steps elsewhere, 0 are allowed"
        yield from _hash_findings(seen)
    else:
        yield from _noisy_findings(seen, floor)


def _hash_findings(seen: Mapping[str, Any]) -> Iterator[str]:
    if seen.get("hashes") == 0:
        yield "no full-state hash was given"
    if seen.get("hashes_differing"):
        yield (
            f"{seen['hashes_differing']} of {seen['hashes']} full-state hashes differ from the same steps elsewhere, "
            f"first after {seen['hash_differs_at']} tokens; 0 are allowed"
        )


def _noisy_findings(seen: Mapping[str, Any], floor: Mapping[str, Any]) -> Iterator[str]:
    for when, caches in seen["caches"].items():
        for kind, difference in caches.items():
            allowed = SINGLE_MULTIPLE * max(floor["caches"][kind]) + CACHE_RESOLUTION
            if not difference <= allowed:
                place = when.replace("_", " ")
                yield f"{kind} cache {place} differs by {difference:.3g} (relative RMS), allowed {allowed:.3g}"
    largest = max(value if math.isfinite(value) else math.inf for value in seen["logit_rms"])
    allowed = SINGLE_MULTIPLE * max(floor["logit_rms"])
    if not largest <= allowed:
        token = seen["logit_rms"].index(max(seen["logit_rms"]))
        yield f"logits of token {token} differ by {largest:.3g} (RMS), allowed {allowed:.3g}"


def schedule_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per scenario: what was compared, and the largest difference."""
    rows: list[list[str | int | float]] = []
    for result in results.values():
        exact = [seen for seen in result["requests"] if seen["exact"]]
        noisy = [seen for seen in result["requests"] if not seen["exact"]]
        logits = [value for seen in noisy for value in seen.get("logit_rms", ())]
        floor = max(result["floor"].get("logit_rms", [0.0]))
        rows.append(
            [
                result["schedule"],
                len(exact),
                sum(seen.get("differing", 0) for seen in exact),
                _hashes_equal(exact),
                len(noisy),
                f"{max(logits) / floor:.2f}" if logits and floor else "none",
                sum(result["broken"].values()),
            ]
        )
    header = [
        "schedule",
        "bit for bit",
        "elements that differ",
        "equal state hashes",
        "within noise",
        "worst token, floors",
        "broken words",
    ]
    caption = (
        "Requests in company against the same requests elsewhere in the same arm. State hashes: SHA-256 of all live "
        "bytes of a request's caches, after every step. Allowed: no differing element, no differing hash, a "
        f"token's logits and a single request's caches {SINGLE_MULTIPLE:.3g} floors, those of the typical request "
        f"{SCHEDULE_MULTIPLE:.3g}, no broken word."
    )
    return Table("Requests under schedules", header, rows, caption)


def _hashes_equal(exact: Sequence[Mapping[str, Any]]) -> str:
    compared = sum(seen.get("hashes", 0) for seen in exact)
    equal = compared - sum(seen.get("hashes_differing", 0) for seen in exact)
    return f"{equal} of {compared}" if compared else "none"
