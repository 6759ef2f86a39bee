"""Probe of the numerics gate: every op on inputs captured while the model decodes held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from validation.gates.base import Context, Json, Unit
from validation.gates.numerics.contracts import ROW_INPUTS
from validation.gates.numerics.measure import measure_case
from validation.gates.parity.measure import windows
from validation.targets.capture import captured_cases

PROMPT, DECODE, BATCH, CASES = 40, 12, 3, 2
"""Tokens before and during the captured decode, sequences in it, and cases kept of every op."""

_known: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
"""The last capture of this process: units of one run come one after the other."""


def units(ops: Sequence[str], deep: bool) -> list[Unit]:
    """A unit per op and cache format."""
    return [
        Unit(f"probe-captured-{kv}-{op}", {"probe": "captured", "op": op, "kv_cache_dtype": kv, "rows": BATCH})
        for op in ops
        for kv in _formats(op)
    ]


def measure(unit: Unit, context: Context) -> dict[str, Json]:
    """Both arms on the captured cases of one op. An op that this model's plain decode does not use has none."""
    op, kv = unit.params["op"], unit.params["kv_cache_dtype"]
    baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
    cases = [
        {"family": f"captured call {i} ({kv} cache)", "seed": context.seed}
        | measure_case(op, case, baseline, candidate)
        for i, case in enumerate(_captured(context, kv).get(op, []))
    ]
    return {**unit.params, "width": "model", "cases": cases}


def _formats(op: str) -> tuple[str, ...]:
    return ("bf16", "fp8") if op.startswith("mla") else ("fp8",)


def _captured(context: Context, kv: str) -> dict[str, list[dict[str, Any]]]:
    key = (*context.target.fingerprint().values(), kv, str(context.seed))
    if key not in _known:
        _known.clear()
        config = replace(
            context.baseline, name="captured", kv_cache_dtype=kv, max_batch=BATCH, max_context=PROMPT + DECODE
        )
        sequences = windows(context.target, BATCH, PROMPT + DECODE, context.seed)
        _known[key] = captured_cases(context.target, config, sequences, PROMPT, CASES, context.seed, _decodes)
    return _known[key]


def _decodes(op: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call belongs to a decode step: rows of a prompt, all at once, are no case for the fused ops."""
    if op not in ROW_INPUTS:
        return True
    rows = arguments[ROW_INPUTS[op][0]]
    return len(rows[0] if isinstance(rows, list | tuple) else rows) <= BATCH
