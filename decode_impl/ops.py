"""The table of ops that a path consists of, and how one op is called on a case of docs/ops.md.

An op takes its case's inputs as keyword arguments: a group of dotted inputs (`y.0`, `y.1`, ...) becomes a sequence, and
a `*_packed` / `*_scale` pair becomes an `MXFP4Weight`. Pools (caches, states) are written in place. Some ops take
further keyword-only *parts*, such as the specialised attention's `merge`, that a fault may replace from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from decode_impl.mxfp4 import MXFP4Weight

OpTable = Mapping[str, Callable[..., Any]]
"""One path's ops by name."""

OUTPUTS: dict[str, tuple[str, ...]] = {
    "projection": ("y",),
    "rms_norm": ("y",),
    "all_reduce": ("y",),
    "attn_res": ("prefix", "mixed"),
    "output_mix": ("prefix", "mixed"),
    "kda_step": ("y",),
    "kda_verify": ("y",),
    "kda_sequence": ("y",),
    "mla_query": ("q",),
    "mla_attend": ("latent",),
    "mla_attend_dcp": ("latent",),
    "mla_attend_sequence": ("latent",),
    "mla_value": ("y",),
    "moe_front": ("logits", "z"),
    "route": ("ids", "weights"),
    "experts": ("latent",),
    "shared_expert": ("partial",),
    "moe_tail": ("delta",),
}
"""What each op returns, in order."""

POOLS: dict[str, tuple[str, ...]] = {
    "kda_step": ("conv_state", "state"),
    "kda_verify": ("conv_state", "state"),
    "kda_sequence": ("conv_state", "state"),
    "mla_query": ("cache",),
}
"""Inputs that an op writes in place; they count among its outputs."""


def call_on_case(ops: OpTable, name: str, case: Mapping[str, Any], in_place: bool = False) -> dict[str, Tensor]:
    """Run op `name` on a case; returns its outputs and the pools after it.

    The case stays as it is, unless `in_place`: then the op writes the case's own pools. A pool that is a view with gaps
    between its rows reaches the op as such a view, of a copy of all that it is a view of.

    Raises:
        LookupError: the path has no such op, or `OUTPUTS` does not say what it returns.
    """
    if name not in ops:
        raise LookupError(f"op {name} has no entry in this path's table OPS: see docs/extending.md for the tables")
    if name not in OUTPUTS:
        raise LookupError(f"op {name} has no entry in OUTPUTS of decode_impl/ops.py")
    pools = {pool: case[pool] if in_place else _copied(case[pool]) for pool in POOLS.get(name, ())}
    result = ops[name](**_arguments({**case, **pools}))
    returned = result if isinstance(result, tuple) else (result,)
    return {**dict(zip(OUTPUTS[name], returned, strict=True)), **pools}


def _copied(pool: Tensor) -> Tensor:
    """A copy with the same strides."""
    if pool.is_contiguous():
        return pool.clone()
    elements = pool.untyped_storage().nbytes() // pool.element_size()
    everything = pool.as_strided((elements,), (1,), 0).clone()
    return everything.as_strided(pool.size(), pool.stride(), pool.storage_offset())


def _arguments(case: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    groups: dict[str, dict[int, Tensor]] = {}
    for key, value in case.items():
        stem, _, index = key.rpartition(".")
        if stem:
            groups.setdefault(stem, {})[int(index)] = value
        elif key.endswith("_packed"):
            weight = key.removesuffix("_packed")
            arguments[weight] = MXFP4Weight(value, case[f"{weight}_scale"])
        elif not (key.endswith("_scale") and f"{key.removesuffix('_scale')}_packed" in case):
            arguments[key] = value
    return arguments | {stem: [group[i] for i in sorted(group)] for stem, group in groups.items()}
