"""How the generic path's CUDA form is judged, under the interpreter and on a GPU: by the generic contract, and beside
the plain ops."""

from __future__ import annotations

from typing import Any

from kernel_judgement import SCORE_ULPS, Case, changed
from torch import Tensor

from decode_impl import generic
from decode_impl.ops import call_on_case
from numerics.bounds import F32
from numerics.contracts import GENERIC, compliance, expected, route_weights
from numerics.metrics import error_stats
from numerics.oracles import ORACLES, comparable, route_disagreements, written

OWN = (
    *("projection", "rms_norm", "attn_res", "output_mix", "kda_step", "kda_verify", "mla_query", "mla_attend"),
    *("mla_value", "moe_front", "route", "experts", "shared_expert", "moe_tail"),
)
"""The ops of a decode step: those that the CUDA form has kernels for."""

NOT_PINNED = ("mla_attend",)
"""A numerator keeps 17 bits on its way into the product: one latent in some hundreds rounds to its other neighbour."""


def judge(op: str, case: Case, got: dict[str, Tensor], label: object) -> None:
    """Assert that outputs on the CPU are what the generic contract allows and as accurate as the plain op's."""
    masks = written(op, case)
    for pool, mask in masks.items():
        assert changed(got[pool][~mask], case[pool][~mask]) == 0, (label, pool)
    if op == "route":
        judged = route_disagreements(case["logits"], case["bias"], got["ids"], case["top_k"])
        assert judged.malformed == judged.disagreements_beyond(SCORE_ULPS) == 0, (label, judged)
        assert compliance(got["weights"], route_weights(case, got["ids"])), label
        return
    for name, allowed in expected(op, GENERIC, case, got).items() if op not in NOT_PINNED else ():
        rows: Any = masks.get(name, slice(None))
        outside = compliance(got[name][rows], allowed[rows]).outside if got[name][rows].numel() else 0
        assert outside == 0, (label, name, outside)
    _as_accurate_as_the_plain_op(op, case, got, label)


def _as_accurate_as_the_plain_op(op: str, case: Case, got: dict[str, Tensor], label: object) -> None:
    exact, masks = ORACLES[op](case), written(op, case)
    mine, theirs = (comparable(op, case, x) for x in (got, call_on_case(generic.OPS, op, case)))
    for name, reference in exact.items():
        rows: Any = masks.get(name, slice(None))
        # Twice the plain op's error, and one FP32 rounding per addition for outputs that are not rounded.
        floor = 512 * F32.unit_roundoff * float(reference[rows].abs().max()) if reference[rows].numel() else 0.0
        errors = [error_stats(x[name][rows], reference[rows]).rmse for x in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + floor, (label, name, errors)
