"""A target whose fault-free arms remember what they computed, so that faults share the baseline's measurements."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from validation.targets.base import Arm, ArmConfig, Case, CollectiveArm, Counters, ForcedDecode, ForcedStep, Target
from validation.targets.optional import Accepting, Verifying
from validation.targets.schedule import Played, Schedule
from validation.targets.text import Answer, Ask

_MOST_BYTES = 256 * 2**20
"""Remembered results of ops in bytes; the faults of one component share far less."""


class SharedTarget:
    """`target`, except that arms without faults are opened once and remember their results by content."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._arms: dict[ArmConfig, RememberingArm] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, config: ArmConfig) -> Arm:
        """An arm of its own for a configuration with faults, a shared one for any other."""
        if config.faults:
            return self._target.open(config)
        if config not in self._arms:
            self._arms[config] = RememberingArm(self._target.open(config))
        return cast(Arm, self._arms[config])

    def forget(self) -> None:
        """Drop what is remembered; results do not change by it."""
        for arm in self._arms.values():
            arm.forget()


class RememberingArm:
    """An arm that computes every op and every teacher-forced decode once."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self.config = arm.config
        self._results: dict[bytes, dict[str, Tensor]] = {}
        self._held = 0
        self._decodes: dict[Any, _Decoded] = {}
        self._played: dict[Schedule, Played] = {}
        self._answered: dict[tuple[Ask, ...], list[Answer]] = {}

    def ops(self) -> frozenset[str]:
        """As the arm's."""
        return self._arm.ops()

    def run_op(self, op: str, case: Case, in_place: bool = False) -> dict[str, Tensor]:
        """As the arm's; nobody may write to the result."""
        if in_place:
            return self._arm.run_op(op, case, in_place)
        key = _digest(op, case)
        if key not in self._results:
            outputs = self._arm.run_op(op, case)
            self._held += sum(x.nbytes for x in outputs.values())
            if self._held > _MOST_BYTES:
                self.forget()
            self._results[key] = outputs
        return dict(self._results[key])

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> _Decoded:
        """As the arm's; the caches can be asked for after the last step only."""
        key = (tuple(map(tuple, sequences)), prompt_length)
        if key not in self._decodes:
            decode = self._arm.forced_decode(sequences, prompt_length)
            steps = list(decode)
            self._decodes[key] = _Decoded(steps, [decode.state(i) for i in range(len(sequences))])
            decode.close()
        return self._decodes[key]

    def verify_decode(
        self, sequences: Sequence[Sequence[int]], prompt_length: int, drafts: int, accepted: Sequence[int]
    ) -> ForcedDecode:
        """As the arm's; not remembered: only the judged arm is asked."""
        return cast(Verifying, self._arm).verify_decode(sequences, prompt_length, drafts, accepted)

    def generate(self, schedule: Schedule) -> Played:
        """As the arm's."""
        if schedule not in self._played:
            self._played[schedule] = self._arm.generate(schedule)
        return self._played[schedule]

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """As the arm's."""
        key = tuple(asks)
        if key not in self._answered:
            self._answered[key] = self._arm.answer(asks)
        return list(self._answered[key])

    def accept(self, *draft: Any) -> tuple[int, bool]:
        """As the arm's."""
        return cast(Accepting, self._arm).accept(*draft)

    def sample(self, *row: Any) -> int:
        """As the arm's."""
        return cast(Accepting, self._arm).sample(*row)

    def collectives(self) -> Any:
        """As the arm's."""
        return cast(CollectiveArm, self._arm).collectives()

    def counters(self) -> Counters:
        """As the arm's: remembered steps are not counted again."""
        return self._arm.counters()

    def forget(self) -> None:
        """Drop the results of ops; decodes are few and stay."""
        self._results.clear()
        self._held = 0


class _Decoded:
    """A finished teacher-forced decode."""

    def __init__(self, steps: list[ForcedStep], states: list[dict[str, Tensor]]) -> None:
        self._steps, self._states = steps, states

    def __iter__(self) -> Iterator[ForcedStep]:
        return iter(self._steps)

    def state(self, sequence: int) -> dict[str, Tensor]:
        """The sequence's caches after the last step."""
        return self._states[sequence]

    def close(self) -> None:
        """Nothing is held."""


def _digest(op: str, case: Case) -> bytes:
    """Content of a case: names, plain numbers, and every tensor's type, shape, strides and bits."""
    seen = hashlib.blake2b(op.encode(), digest_size=16)
    for name in sorted(case):
        value = case[name]
        if isinstance(value, Tensor):
            seen.update(repr((name, value.dtype, tuple(value.shape), value.stride())).encode())
            seen.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            seen.update(repr((name, value)).encode())
    return seen.digest()
