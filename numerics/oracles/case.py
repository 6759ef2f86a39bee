"""What an oracle takes and returns, and how an implementation's outputs are brought to the oracle's
values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numerics.formats import e4m3_decode

Case = Mapping[str, Any]
"""The inputs of one op by the names of docs/ops.md. An oracle never changes them."""

Outputs = dict[str, Tensor]
"""The outputs of one op by the names of docs/ops.md: float64, ids int64."""


def numbered(case: Case, name: str) -> list[Tensor]:
    """The tensors `name.0`, `name.1`, ... in order, one per rank."""
    parts: list[Tensor] = []
    while (key := f"{name}.{len(parts)}") in case:
        parts.append(case[key])
    if not parts:
        raise KeyError(f"the case has no {name}.0")
    return parts


def stored_values(x: Tensor, scale: float) -> Tensor:
    """A float64 copy of stored elements; E4M3 bytes are decoded and multiplied by their scale."""
    return e4m3_decode(x, torch.float64) * scale if x.dtype is torch.uint8 else pool(x)


def pool(x: Tensor) -> Tensor:
    """A float64 copy of a pool, for the oracle to update."""
    return x.to(torch.float64, copy=True)


def comparable(op: str, case: Case, outputs: Mapping[str, Tensor]) -> Outputs:
    """An implementation's outputs as float64 (ids stay int64), in the unit of the oracle's.

    Only `mla_query` with an FP8 cache differs from a plain cast: its bytes are decoded with `q_scale` and
    `k_scale`.
    """
    scales = {"q": "q_scale", "cache": "k_scale"} if op == "mla_query" else {}
    values = {}
    for name, x in outputs.items():
        integral = x.dtype is torch.int64
        values[name] = x if integral else stored_values(x, case[scales[name]] if name in scales else 1.0)
    return values


def written(op: str, case: Case) -> dict[str, Tensor]:
    """Which rows of each pool the op may change: a bool mask over the pool's slots, or over its [pages,
    page] rows.

    Everything outside must keep its bits; error figures of a pool mean something only inside. Ops without
    a pool give an empty dictionary.
    """
    if op in ("kda_step", "kda_verify", "kda_sequence"):
        if op == "kda_verify":
            slots = case["targets"][case["sources"] > 0].flatten()
        else:
            slots = case["slots"] if op == "kda_step" else torch.tensor([case["slot"]])
        mask = torch.zeros(case["state"].shape[0], dtype=torch.bool)
        mask[slots[slots > 0].cpu()] = True
        return {"conv_state": mask, "state": mask}
    if op == "mla_query":
        pages, page = case["cache"].shape[:2]
        positions = case["positions"].cpu()
        mask = torch.zeros(pages * page, dtype=torch.bool)
        mask[positions[positions >= page]] = True
        return {"cache": mask.view(pages, page)}
    return {}
