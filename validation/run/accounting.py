"""Which arms a unit really used: a target that passes everything on and watches the arms opened through it."""

from __future__ import annotations

from typing import Any

from validation.gates.base import Context
from validation.records.record import ArmUse, counters_doc
from validation.targets.base import Arm, ArmConfig, Target


def role(config: ArmConfig, context: Context) -> str:
    """Under which arm's name the use of `config` is counted.

    A gate may open variants of its two arms (another cache format, another number of ranks). A variant that keeps
    the arm's name, or has the candidate's backend where the two arms' backends differ, counts for that arm.
    """
    own_backend = context.candidate.decode_backend != context.baseline.decode_backend
    if config.name in (context.baseline.name, context.candidate.name):
        return config.name
    if own_backend and config.decode_backend == context.candidate.decode_backend:
        return context.candidate.name
    return config.name


class WatchedTarget:
    """`context.target`, except that `open` is noted."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._target: Target = context.target
        self._opened: list[tuple[str, Arm, ArmUse]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, config: ArmConfig) -> Arm:
        """Open an arm of the watched target; an arm that the target hands out twice is counted once."""
        arm = self._target.open(config)
        if not any(known is arm for _, known, _ in self._opened):
            self._opened.append((role(config, self._context), arm, counters_doc(arm.counters())))
        return arm

    def use(self) -> dict[str, ArmUse]:
        """What ran since the arms were opened here, by arm. An opened arm is listed even if it made no step."""
        total: dict[str, ArmUse] = {}
        for name, arm, before in self._opened:
            now = counters_doc(arm.counters())
            so_far = total.get(name, ArmUse())
            total[name] = ArmUse(
                steps=_grown(so_far.steps, before.steps, now.steps),
                fallbacks=_grown(so_far.fallbacks, before.fallbacks, now.fallbacks),
            )
        return total


def _grown(total: dict[str, int], before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    growth = {key: total.get(key, 0) + now.get(key, 0) - before.get(key, 0) for key in {*total, *now}}
    return {key: growth[key] for key in sorted(growth) if growth[key]}
