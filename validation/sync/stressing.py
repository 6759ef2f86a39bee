"""What a stress run measures, as plain JSON: quiet and delayed runs, controls, a stalled and a killed rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from validation.delta_debugging import smallest_part
from validation.sync.controls import stress_controls
from validation.sync.replays import delays_document
from validation.sync.stress import Outcome, fails, stress
from validation.sync.stress_plan import POINTS, Delay, StressPlan, with_delays

DELAYS_PER_STEP = 0.3
"""Delays a rank and step: often enough for several ranks to be late at once, and for most calls to run at speed."""

LIMIT_MS = 30_000
"""Time limit of waits where nothing is wrong: a loaded host may leave a process unscheduled for seconds."""

SHORT_MS = 1_000
"""Time limit of waits where something is wrong on purpose."""

CONTROL_STEPS, CONTROL_DELAYS = 120, 3.0
"""Steps of a control, and delays a rank and step. The rarest to show, a slot used twice in a row, takes 3 ms before a
load of one certain sum of three: a dozen such delays are expected, so one seed in a hundred thousand has none."""

_MOST_PROBES = 12
"""Runs of a delay plan that its reduction may take, a second or so each."""


def stressed(ranks: int, steps: int, seeds: Sequence[int], faults: Sequence[str]) -> dict[str, Any]:
    """Stress the collectives with `ranks` processes; `faults` holds the fault that is in them, if one is."""
    fault = faults[0] if faults else ""
    plans: list[StressPlan] = []
    for seed in seeds:
        quiet = StressPlan(ranks, steps, seed, fault=fault, limit_ms=LIMIT_MS if not fault else SHORT_MS)
        plans += [quiet, with_delays(quiet, DELAYS_PER_STEP)]
    short = replace(plans[0], steps=CONTROL_STEPS, limit_ms=SHORT_MS)
    stopped = replace(short, stop=(0, CONTROL_STEPS // 2), limit_ms=SHORT_MS // 2)
    odd = replace(short, odd_one=(ranks - 1, CONTROL_STEPS // 2))
    controls = [] if fault else [with_delays(plan, CONTROL_DELAYS) for plan in stress_controls(short)]
    last = [stopped, odd, replace(stopped, kill=True)]
    outcomes = stress([*plans, *controls, *last])
    judged, rest = outcomes[: len(plans)], outcomes[len(plans) :]
    return {
        "ranks": ranks,
        "steps": sum(outcome.plan.steps for outcome in judged[1::2]),
        "failures": [failure for pair in zip(judged[::2], judged[1::2], strict=True) for failure in _failures(*pair)],
        "delays": _delays(judged),
        "controls": {o.plan.fault: {"caught": not o.clean, "how": _how(o)} for o in rest[: len(controls)]},
        "stopped": dict(zip(("stalled", "disagreed", "killed"), map(_stopped, rest[len(controls) :]), strict=True)),
    }


def _failures(quiet: Outcome, delayed: Outcome) -> list[dict[str, Any]]:
    if not quiet.clean:
        return [{"seed": quiet.plan.seed, "how": _how(quiet), "replay": delays_document(quiet.plan)}]
    if delayed.clean and delayed.digest == quiet.digest:
        return []
    return [{"seed": delayed.plan.seed, "how": _how(delayed), "replay": delays_document(smallest(delayed.plan))}]


def smallest(plan: StressPlan) -> StressPlan:
    """The plan with as few of its delays as still make most runs fail; unchanged where it does not fail again."""

    def still(delays: Sequence[Delay]) -> bool:
        return fails(replace(plan, delays=tuple(delays), limit_ms=SHORT_MS))

    if not still(plan.delays):
        return plan
    return replace(plan, delays=tuple(smallest_part(plan.delays, still, _MOST_PROBES)))


def _how(outcome: Outcome) -> str:
    if outcome.errors:
        return "; ".join(outcome.errors)
    if None in outcome.ranks:
        return "a rank did not come to an end"
    return "ranks have different sums" if not outcome.clean else "the sums are not those of the quiet run"


def _delays(outcomes: Sequence[Outcome]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.applied())
    return {point: total[point] for point in POINTS}


def _stopped(outcome: Outcome) -> dict[str, Any]:
    """How a step ended in which one rank stalled, died or disagreed: what every rank said, and how long it waited."""
    return {
        "limit_ms": outcome.plan.limit_ms,
        "killed": outcome.plan.kill,
        "ranks": [
            None if rank is None else {"kind": rank["kind"], "error": rank["error"], "waited_ms": rank["waited_ms"]}
            for rank in outcome.ranks
        ],
    }
