"""FP64 oracles of every op in docs/ops.md: `ORACLES[op](case)` gives the op's outputs in float64 (ids in
int64).

An oracle takes the stored inputs exactly and rounds nothing on the way: every rounding that docs/ops.md
lists is the implementation's error, measured against it. Where an op returns bytes the oracle returns the
values before they are quantised; `comparable` brings an implementation's outputs to the same unit. Pools
come back whole.
"""

from __future__ import annotations

from collections.abc import Callable

from numerics.oracles import attn_res, kda, linear, mla, moe
from numerics.oracles.case import Case, Outputs, comparable, written
from numerics.oracles.routing import RouteJudgement, route_disagreements

ORACLES: dict[str, Callable[[Case], Outputs]] = {
    "projection": linear.projection,
    "rms_norm": linear.rms_norm,
    "all_reduce": linear.all_reduce,
    "attn_res": attn_res.attn_res,
    "output_mix": attn_res.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "kda_sequence": kda.kda_sequence,
    "mla_query": mla.mla_query,
    "mla_attend": mla.mla_attend,
    "mla_attend_dcp": mla.mla_attend_dcp,
    "mla_attend_sequence": mla.mla_attend_sequence,
    "mla_value": mla.mla_value,
    "moe_front": moe.moe_front,
    "route": moe.route,
    "experts": moe.experts,
    "shared_expert": moe.shared_expert,
    "moe_tail": moe.moe_tail,
}

__all__ = ["ORACLES", "Case", "Outputs", "RouteJudgement", "comparable", "route_disagreements", "written"]
