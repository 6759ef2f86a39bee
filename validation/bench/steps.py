"""Decode and verify steps of both arms: from the embedding to the logits, without sampling, drafter or scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from decode_impl.batch import Batch
from decode_impl.ops import OpTable
from decode_impl.specialized.contract import MAX_ROWS, batch_bin
from decode_impl.weights import ModelWeights
from validation.bench.arms import StepArm, Tables
from validation.bench.clock import Clock, interleaved
from validation.bench.compiled import compiled_tables, compiling
from validation.bench.lines import COMPILED, GENERIC, MICROSECONDS, TOKENS, Line, limit_of, of_rates, of_times
from validation.bench.traffic import step_bytes

SYNTHETIC_SHARE = 0.75
"""Share of a verify step's rows that are taken to be committed: 3 of 4, 4.5 of 6, 6 of 8 (the published length)."""

_LINE_SECONDS = 4.0
"""Most seconds for the rounds of one line: at least one round is measured."""


def committed(drafts: int) -> float:
    """Tokens that a verify step is assumed to commit. SYNTHETIC: no draft was made or judged."""
    return SYNTHETIC_SHARE * (1 + drafts)


@dataclass(frozen=True)
class StepBench:
    """What all lines of steps share."""

    weights: ModelWeights
    tables: Tables
    clock: Clock
    bytes_per_second: float
    context: int
    rounds: int
    seed: int

    def lines(self, batches: tuple[int, ...], drafts: int) -> Iterator[Line]:
        """Lines of steps with `drafts` drafts a request, for as many requests of `batches` as a step holds.

        Both arms' caches live until the last line. Each arm captures all its steps first, so that none pays for it.
        """
        width = 1 + drafts
        wanted = [requests for requests in batches if requests * width <= MAX_ROWS]
        if not wanted:
            return
        arms = [self._arm(table, max(wanted), width) for table in (self.tables.generic, self.tables.specialised)]
        for arm in arms:
            arm.capture([(batch_bin(requests * width), width) for requests in wanted])
        for requests in wanted:
            yield from self._measured(arms[0], arms[1], requests, drafts)

    def against_compiled(self, batches: tuple[int, ...]) -> Iterator[Line]:
        """The generic arm's decode step beside the same ops through torch.compile, captured alike."""
        for requests in batches:
            tables = compiled_tables(self.tables.generic, compiling())
            names = ("all ops compiled", "all but the experts compiled, those as in the generic arm")
            for note, table in zip(names, tables, strict=True):
                arms = [self._arm(each, requests, 1) for each in (table, self.tables.generic)]
                batch = arms[0].batch(requests, self.seed + requests)
                for arm in arms:
                    arm.step(batch)()  # compiled before it is captured
                    arm.capture([(batch_bin(requests), 1)])
                calls = [arm.step(batch) for arm in arms]
                pair = interleaved(self.clock.seconds, calls[0], calls[1], self.rounds, _LINE_SECONDS)
                times = of_times(pair, 1e6, (COMPILED, GENERIC))
                yield Line("generic beside torch.compile", requests, 0, MICROSECONDS, **times, note=note)

    def _arm(self, table: OpTable, requests: int, width: int) -> StepArm:
        return StepArm(self.weights, table, self.context, requests, width, self.seed)

    def _measured(self, generic: StepArm, specialised: StepArm, requests: int, drafts: int) -> Iterator[Line]:
        name = "verify step" if drafts else "decode step"
        batch = specialised.batch(requests, self.seed + requests)
        try:
            agreement = _agreement(generic, specialised, batch)
        except ArithmeticError as error:
            yield Line(name, requests, drafts, MICROSECONDS, error=str(error))
            return
        size = step_bytes(self.weights, specialised.chosen_experts(batch), requests, 1 + drafts, self.context)
        calls = generic.step(batch), specialised.step(batch)
        for call in calls:
            call()
        pair = interleaved(self.clock.seconds, *calls, self.rounds, _LINE_SECONDS)
        limit = limit_of(pair, size, self.bytes_per_second)
        yield Line(name, requests, drafts, MICROSECONDS, **of_times(pair, 1e6), limit=limit, note=agreement)
        rates = of_rates(pair, requests * (committed(drafts) if drafts else 1))
        said = f"SYNTHETIC acceptance: {committed(drafts):g} tokens a step assumed; drafter not counted"
        yield Line(
            "decode throughput", requests, drafts, TOKENS, **rates, limit=limit, synthetic=drafts > 0,
            note=said if drafts else "",
        )  # fmt: skip


def _agreement(generic: StepArm, specialised: StepArm, batch: Batch) -> str:
    """That both arms compute the same step, as a relative RMS difference of their logits. It judges nothing.

    Raises:
        ArithmeticError: an arm's logits are not finite: its time says nothing.
    """
    a, b = (arm.eager(batch).logits.double() for arm in (generic, specialised))
    for name, logits in (("generic", a), ("specialised", b)):
        if not bool(torch.isfinite(logits).all()):
            raise ArithmeticError(f"the {name} arm's logits are not finite; its time would say nothing")
    return f"logits differ by {float((a - b).square().mean().sqrt() / a.square().mean().sqrt()):.2g} (RMS)"
