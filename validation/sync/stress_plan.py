"""What a stress run does: the calls of every step and the delays at its sync points, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

POINTS = ("data", "flag", "wait", "read", "return")
"""Where a rank can be delayed: before a store of payload, a store of a flag, a wait, a load of payload, a return."""

MAGNITUDES = (50, 400, 3000)
"""Delays in microseconds: shorter than a call, about a call, several calls of the peers."""

LAYERS = 3
"""Collectives of a step, between two agreements; an odd number, so that parities by layer would collide."""

KINDS = ("one_shot", "two_shot", "in_place", "mail_without_flags")


@dataclass(frozen=True, order=True)
class Delay:
    """Rank `rank` sleeps in step `step` before its `occurrence`-th operation of this point."""

    step: int
    rank: int
    point: str
    occurrence: int
    microseconds: int


@dataclass(frozen=True)
class StressPlan:
    """A run of `steps` steps. `kinds` are the programs that steps alternate between, drawn from `seed`.

    `stop` is (rank, step): there the rank sleeps for longer than `limit_ms`, or kills itself with `kill`.
    """

    ranks: int
    steps: int
    seed: int
    kinds: tuple[str, ...] = KINDS
    delays: tuple[Delay, ...] = ()
    fault: str = ""
    limit_ms: int = 5000
    stop: tuple[int, int] | None = None
    kill: bool = False
    odd_one: tuple[int, int] | None = None

    def calls(self) -> list[tuple[str, int]]:
        """The program of every step, and its tiles: the batch grows and shrinks."""
        draw = random.Random(self.seed)
        return [(draw.choice(self.kinds), draw.randint(1, 2)) for _ in range(self.steps)]

    def document(self) -> dict[str, Any]:
        """The plan as plain JSON."""
        return asdict(self)


def with_delays(plan: StressPlan, per_step: float) -> StressPlan:
    """The plan with delays drawn from its seed, `per_step` of them a rank and step on average.

    Each is at any operation of its point that a step of one tile has: an agreement and LAYERS sums, a message per peer.
    """
    draw = random.Random(plan.seed * 2 + 1)
    last = (1 + LAYERS) * (plan.ranks - 1) - 1
    drawn = {
        Delay(step, rank, draw.choice(POINTS), draw.randint(0, last), draw.choice(MAGNITUDES))
        for step in range(plan.steps)
        for rank in range(plan.ranks)
        for _ in range(int(per_step) + (draw.random() < per_step % 1))
    }
    return replace(plan, delays=tuple(sorted(drawn)))


def plan_from(document: Any) -> StressPlan:
    """A plan from its JSON.

    Raises:
        ValueError: what is wrong with it, in one line.
    """
    if not isinstance(document, dict) or set(document) != set(StressPlan.__dataclass_fields__):
        raise ValueError(f"a stress plan has the keys {', '.join(StressPlan.__dataclass_fields__)}")
    whole = {"ranks": 16, "steps": 1_000_000, "seed": 2**63, "limit_ms": 600_000}
    for name, most in whole.items():
        if type(document[name]) is not int or not 0 <= document[name] <= most:
            raise ValueError(f"{name} is {str(document[name])[:40]!r}, a whole number from 0 to {most} is needed")
    pairs = {name: _pair(document[name]) for name in ("stop", "odd_one")}
    kinds, delays = document["kinds"], document["delays"]
    if not isinstance(kinds, list) or not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"kinds is a list of {', '.join(KINDS)}")
    if type(document["kill"]) is not bool or not isinstance(document["fault"], str):
        raise ValueError("kill is true or false, fault is an id")
    if not isinstance(delays, list):
        raise ValueError("delays is a list")
    rest = {**document, **pairs, "kinds": tuple(kinds), "delays": tuple(map(_delay, delays))}
    return StressPlan(**rest)


def _pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(x) is not int for x in value):
        raise ValueError("stop and odd_one are null or [rank, step]")
    return value[0], value[1]


def _delay(item: Any) -> Delay:
    fields = Delay.__dataclass_fields__
    if not isinstance(item, dict) or set(item) != set(fields) or item["point"] not in POINTS:
        raise ValueError(f"a delay has the keys {', '.join(fields)}, its point is one of {', '.join(POINTS)}")
    if any(type(item[name]) is not int or not 0 <= item[name] <= 10**9 for name in fields if name != "point"):
        raise ValueError("the numbers of a delay are whole, from 0 to 1e9")
    return Delay(**item)
