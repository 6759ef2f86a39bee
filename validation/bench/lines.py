"""The lines of a bench: one figure of two arms, with its spread, its bytes and its limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from validation.bench.clock import Pair, Spread

GENERIC, SPECIALISED, COMPILED = "generic", "specialised", "torch.compile"
ARMS = (GENERIC, SPECIALISED)

MICROSECONDS, SECONDS, TOKENS = "us", "s", "tokens/s"


@dataclass(frozen=True)
class Limit:
    """What a step has to move, the least time that the ceiling allows, and the share of it that each arm reaches."""

    bytes: int
    least_us: float
    share: Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """One figure. `speedup` is how many times better the second arm is than the first, by rounds of A B B A.

    `synthetic`: acceptance was assumed, not measured. A line that could not be measured has an `error` and no figures.
    """

    name: str
    requests: int = 0
    drafts: int = 0
    unit: str = ""
    arms: Mapping[str, Spread] = field(default_factory=dict)
    speedup: Spread | None = None
    synthetic: bool = False
    limit: Limit | None = None
    note: str = ""
    error: str = ""

    def json(self) -> dict[str, Any]:
        """As plain JSON; what does not apply is left out."""
        data: dict[str, Any] = {
            "line": self.name,
            "requests": self.requests,
            "drafts": self.drafts,
            "unit": self.unit,
            "synthetic_acceptance": self.synthetic,
            "arms": {name: spread.json() for name, spread in self.arms.items()},
        }
        if self.speedup:
            data["speedup"] = {"of": list(self.arms)[::-1], **self.speedup.json()}
        if self.limit:
            data["limit"] = {
                "bytes": self.limit.bytes,
                "least_us": self.limit.least_us,
                "share": dict(self.limit.share),
            }
        return data | {name: text for name, text in (("note", self.note), ("error", self.error)) if text}


def of_times(pair: Pair, scale: float = 1.0, names: tuple[str, str] = ARMS) -> dict[str, Any]:
    """The fields of a line of times, times `scale`; less is better."""
    readings = [[x * scale for x in side] for side in (pair.first, pair.second)]
    return _fields(pair, readings, names)


def of_rates(pair: Pair, amount: float, names: tuple[str, str] = ARMS) -> dict[str, Any]:
    """The fields of a line of `amount` tokens a time; more is better."""
    readings = [[amount / x for x in side] for side in (pair.first, pair.second)]
    return _fields(pair, readings, names)


def _fields(pair: Pair, readings: list[list[float]], names: tuple[str, str]) -> dict[str, Any]:
    arms = {name: Spread.of(side) for name, side in zip(names, readings, strict=True)}
    return {"arms": arms, "speedup": Spread.of(pair.quotients)}


def limit_of(pair: Pair, size: int, bytes_per_second: float, names: tuple[str, str] = ARMS) -> Limit:
    """The limit of steps of these seconds that have to move `size` bytes each."""
    least = size / bytes_per_second
    sides = zip(names, (pair.first, pair.second), strict=True)
    return Limit(size, least * 1e6, {name: least / Spread.of(side).median for name, side in sides})
