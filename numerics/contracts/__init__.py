"""Contract oracles: what each path may return, given the roundings that its contract lists, and nothing else.

`numerics.oracles` says what is exact; these say what is *allowed*: `expected(op, path, case)` follows the roundings of
`numerics.contracts.roundings` in FP64 and bounds what FP32 arithmetic in any order may add (`bounded`). Most outputs
are then pinned to one stored value. An extra rounding, a lost term, a wrong constant moves them off it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from numerics.contracts import kda, linear, mla, moe
from numerics.contracts.check import Compliance, Expected, compliance
from numerics.contracts.moe import route_weights
from numerics.contracts.roundings import CONTRACTS, GENERIC, SPECIALIZED, Contract, contract_table, site_list
from numerics.oracles.case import Case

_ORACLES: dict[str, Callable[[Case, Contract], dict[str, Expected]]] = {
    "projection": linear.projection,
    "rms_norm": linear.rms_norm,
    "all_reduce": linear.all_reduce,
    "attn_res": linear.attn_res,
    "output_mix": linear.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "kda_sequence": kda.kda_sequence,
    "mla_query": mla.mla_query,
    "mla_attend": mla.mla_attend,
    "mla_attend_dcp": mla.mla_attend_dcp,
    "mla_attend_sequence": mla.mla_attend_sequence,
    "mla_value": mla.mla_value,
    "moe_front": moe.moe_front,
    "experts": moe.experts,
    "shared_expert": moe.shared_expert,
    "moe_tail": moe.moe_tail,
}


def add(op: str, oracle: Callable[[Case, Contract], dict[str, Expected]], contract: Contract) -> None:
    """Add the contract of one more op, the same on both paths (see `numerics.extend`)."""
    _ORACLES[op] = oracle
    for path in (GENERIC, SPECIALIZED):
        CONTRACTS[path][op] = contract


def expected(op: str, path: str, case: Case, stored: Mapping[str, Tensor] | None = None) -> dict[str, Expected]:
    """What `op` on `path` (`generic` or `specialized`) may return for this case, by output.

    With the outputs that it `stored`, one output may be held to another that it was made from (the mix to the prefix):
    each is judged by itself, and the doubt about the first does not widen the second.

    `route` has no entry: its ids are judged as sets and its weights by `route_weights` of the ids chosen.
    Raises KeyError for an op or a path without a contract.
    """
    contract = CONTRACTS[path][op]
    if stored is not None and "prefix" in stored and bool(stored["prefix"].isfinite().all()):
        case = {**case, "stored.prefix": stored["prefix"]}
    return {} if op == "route" else _ORACLES[op](case, contract)


__all__ = [
    "CONTRACTS",
    "GENERIC",
    "SPECIALIZED",
    "Compliance",
    "Contract",
    "Expected",
    "add",
    "compliance",
    "contract_table",
    "expected",
    "route_weights",
    "site_list",
]
