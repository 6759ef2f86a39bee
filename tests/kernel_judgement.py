"""How a kernel's outputs are judged, under the interpreter and on a GPU: by the contract, and beside the emulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode_impl.ops import call_on_case
from decode_impl.specialized import emulation
from numerics.bounds import F32
from numerics.contracts import SPECIALIZED, compliance, expected, route_weights
from numerics.metrics import error_stats
from numerics.oracles import ORACLES, comparable, route_disagreements, written

Case = dict[str, Any]

SCORE_ULPS = 4
"""Two sigmoids of 2 ULP each: what the contract allows the score left out and the one taken to be apart."""


def judge(op: str, case: Case, got: dict[str, Tensor], label: object) -> None:
    """Assert that outputs on the CPU are what the contract allows and as accurate as the emulation's."""
    for pool, mask in written(op, case).items():
        assert changed(got[pool][~mask], case[pool][~mask]) == 0, (label, pool)
    if op == "route":
        judged = route_disagreements(case["logits"], case["bias"], got["ids"], case["top_k"])
        assert judged.malformed == judged.disagreements_beyond(SCORE_ULPS) == 0, (label, judged)
        assert compliance(got["weights"], route_weights(case, got["ids"])), label
        return
    assert not any(outside(op, case, got).values()), (label, outside(op, case, got))
    _as_accurate_as_the_emulation(op, case, got, label)


def outside(op: str, case: Case, got: dict[str, Tensor]) -> dict[str, int]:
    """Elements outside the specialised path's contract, by output, where the op may write."""
    masks = written(op, case)
    counts = {}
    for name, allowed in expected(op, SPECIALIZED, case, got).items():
        rows: Any = masks.get(name, slice(None))
        if got[name][rows].numel():
            counts[name] = compliance(got[name][rows], allowed[rows]).outside
    return counts


def changed(a: Tensor, b: Tensor) -> int:
    """Bytes that differ."""
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def _as_accurate_as_the_emulation(op: str, case: Case, got: dict[str, Tensor], label: object) -> None:
    exact, masks = ORACLES[op](case), written(op, case)
    mine, theirs = (comparable(op, case, x) for x in (got, call_on_case(emulation.OPS, op, case)))
    for name, reference in exact.items():
        rows: Any = masks.get(name, slice(None))
        # Twice the emulation's error, and one FP32 rounding per addition for outputs that are not rounded.
        floor = 512 * F32.unit_roundoff * float(reference[rows].abs().max()) if reference[rows].numel() else 0.0
        errors = [error_stats(x[name][rows], reference[rows]).rmse for x in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + floor, (label, name)
