"""Gate 2, parity: do the candidate's next-token logits stay as close to the baseline's as the baseline to itself?

The noise floor comes first: the baseline against itself, with the same sequences batched otherwise and, where the
target has ranks, with another number of them. The candidate passes where its typical KL from the baseline is shown to
be at most TYPICAL_MULTIPLE floors, by a bootstrap over sequences.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from validation.gates.base import Context, GateResult, Json, Unit
from validation.gates.parity_judge import judge_cell
from validation.gates.parity_measure import Arms, measure_parity, other_ranks, windows
from validation.gates.parity_report import cell_table, flip_plot, flip_table, position_plot, ratio_plot, summary
from validation.gates.settings import cells, integers, positive_integer, problems
from validation.targets.base import Arm, ArmConfig, Capability
from validation.verdict import Verdict


class ParityGate:
    """Teacher-forced decode of real text in both arms, per cache format, tensor parallelism and batch size."""

    name = "parity"
    layer = 2
    question = "Are the candidate's next-token logits as close to the baseline's as the baseline is to itself?"
    needs = frozenset({Capability.TEACHER_FORCED, Capability.FULL_LOGITS, Capability.READ_STATE})
    cost = "a decode of every cell in three compositions; minutes in all"

    def settings_error(self, settings: Mapping[str, Json]) -> str | None:
        """Lengths, the least number of sequences a batch size gets, and the cells of the matrix, each named once."""
        wrong = problems(
            settings,
            {
                "prompt_length": positive_integer(100_000),
                "decode_length": positive_integer(100_000),
                "min_sequences": positive_integer(10_000),
                "cells": cells(
                    kv_cache_dtype=("bf16", "fp8"), tensor_parallel=integers(1, 64), batches=integers(1, 64)
                ),
            },
        )
        if wrong:
            return wrong
        ids = [unit.id for unit in _units(settings)]
        twice = sorted({unit for unit in ids if ids.count(unit) > 1})
        return f"cells name {', '.join(twice)} more than once" if twice else None

    def plan(self, context: Context) -> Sequence[Unit]:
        """A unit per cache format, tensor parallelism and batch size."""
        return _units(context.settings)

    def measure(self, unit: Unit, context: Context) -> dict[str, Json]:
        """Decode the unit's sequences in both arms and in the baseline's other composition."""
        kv, ranks, batch = unit.params["kv"], unit.params["tp"], unit.params["batch"]
        prompt, decode = context.settings["prompt_length"], context.settings["decode_length"]
        count = -(-max(batch, context.settings["min_sequences"]) // batch) * batch
        sequences = windows(context.target, count, prompt + decode, _seed(context.seed, unit.id))
        cell = {"kv_cache_dtype": kv, "max_context": prompt + decode, "max_batch": max(batch, 2)}
        floor_ranks = other_ranks(ranks) if Capability.RANKS in context.target.capabilities else ranks

        def arm(config: ArmConfig, tensor_parallel: int) -> Arm:
            return context.target.open(replace(config, tensor_parallel=tensor_parallel, **cell))

        arms = Arms(
            baseline=arm(context.baseline, ranks),
            candidate=arm(context.candidate, ranks),
            floor=arm(context.baseline, floor_ranks),
        )
        measured = measure_parity(arms, sequences, batch, prompt)
        return {"kv": kv, "tp": ranks, "batch": batch, "prompt": prompt, "floor_tp": floor_ranks, **measured}

    def judge(self, results: Mapping[str, dict[str, Json]], context: Context) -> GateResult:
        """Every cell equivalent, its caches within their multiple, and the candidate's own path run."""
        judged = {
            unit: judge_cell(unit, result, _seed(context.seed, unit), len(results)) for unit, result in results.items()
        }
        findings = [finding for cell in judged.values() for finding in cell.findings]
        undecided = [unit for unit, cell in judged.items() if cell.undecided]
        tokens = sum(result["tokens"] for result in results.values())
        verdict = Verdict.PASS
        if findings or not tokens:
            verdict = Verdict.FAIL
        elif undecided:
            verdict = Verdict.INCONCLUSIVE
        return GateResult(
            gate=self.name,
            verdict=verdict,
            summary=summary(results, judged, undecided, tokens),
            findings=findings,
            metrics={"tokens": tokens, "cells": {unit: cell.as_json() for unit, cell in judged.items()}},
            tables=[cell_table(results, judged), flip_table(results)],
            plots=[position_plot(results), ratio_plot(judged), flip_plot(results)],
        )


def _units(settings: Mapping[str, Json]) -> list[Unit]:
    return [
        Unit(
            f"{cell['kv_cache_dtype']}-tp{ranks}-b{batch}",
            {"kv": cell["kv_cache_dtype"], "tp": ranks, "batch": batch},
        )
        for cell in settings["cells"]
        for ranks in cell["tensor_parallel"]
        for batch in cell["batches"]
    ]


def _seed(seed: int, unit: str) -> int:
    return seed * 2**32 + zlib.crc32(unit.encode())
