"""Exact contracts of an op: what must hold bit for bit, whatever the rounding.

Each check returns the number of elements that break it; zero is the only passing figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from numerics.formats import E4M3_NAN
from numerics.oracles import written
from validation.targets.base import Case

Run = Callable[[Case], dict[str, Tensor]]
"""Runs the op on a case without changing it."""

POISONS = {"NaN": float("nan"), "3e38": 3e38}
"""What unread memory is filled with. NaN survives a product with zero; 3e38 survives a max and overflows a sum."""

_ROW_INPUTS: dict[str, tuple[str, ...]] = {
    "projection": ("x",),
    "rms_norm": ("x",),
    "all_reduce": ("y",),
    "attn_res": ("prefix", "delta", "blocks"),
    "output_mix": ("prefix", "blocks", "y"),
    "kda_step": ("proj", "slots"),
    "mla_query": ("a", "positions"),
    "mla_attend": ("q", "block_table", "lengths"),
    "mla_value": ("latent", "gate"),
    "moe_front": ("x",),
    "route": ("logits",),
    "experts": ("z", "ids", "weights"),
    "shared_expert": ("x",),
    "moe_tail": ("latent", "shared"),
}
"""Inputs that have one entry per row (dotted groups by their stem); sequence ops have none, their rows are ordered."""


def unowned_bytes_changed(op: str, case: Case, run: Run) -> int:
    """Pool elements outside the rows that the op owns whose bits changed; the null slot and page are among them."""
    outputs = run(case)
    changed = 0
    for pool, mask in written(op, case).items():
        before, after = case[pool][~mask], outputs[pool][~mask]
        changed += _differing(before, after)
    return changed


def rerun_differs(op: str, case: Case, run: Run) -> int:
    """Output elements whose bits differ between two runs on the same inputs."""
    first, second = run(case), run(case)
    return sum(_differing(first[name], second[name]) for name in first)


def null_rows_not_zero(op: str, case: Case, run: Run) -> int:
    """Elements that are not zero in rows which belong to nobody (slot 0, or no key to see)."""
    if op == "kda_step":
        return int((run(case)["y"][case["slots"] == 0] != 0).sum())
    if op == "mla_attend":
        return int((run(case)["latent"][case["lengths"] == 0] != 0).sum())
    return 0


def row_order_matters(op: str, case: Case, run: Run) -> int:
    """Elements whose bits change when the rows come in the opposite order: a row's place must not matter."""
    if op not in _ROW_INPUTS:
        return 0
    pools = written(op, case).keys()
    reversed_case = {
        key: value.flip(0) if key.split(".")[0] in _ROW_INPUTS[op] and isinstance(value, Tensor) else value
        for key, value in case.items()
    }
    straight, flipped = run(case), run(reversed_case)
    return sum(
        _differing(value, flipped[name] if name in pools else flipped[name].flip(0)) for name, value in straight.items()
    )


def poison_leaks(op: str, case: Case, run: Run) -> int:
    """Elements of the op's own outputs whose bits change when everything it must not read is poisoned."""
    leaks = 0
    clean = run(case)
    masks = written(op, case)
    for poison in POISONS.values():
        poisoned_case = _poisoned(op, case, poison)
        if poisoned_case is None:
            return 0
        dirty = run(poisoned_case)
        for name, value in clean.items():
            mask = masks.get(name)
            rows = slice(None) if mask is None else mask
            leaks += _differing(value[rows], dirty[name][rows])
    return leaks


CONTRACTS: dict[str, Callable[[str, Case, Run], int]] = {
    "unowned bytes unchanged": unowned_bytes_changed,
    "same bits twice": rerun_differs,
    "null rows zero": null_rows_not_zero,
    "row order free": row_order_matters,
    "poison ignored": poison_leaks,
}
"""Contracts by name. `row order free` is the specialised path's alone."""


def _poisoned(op: str, case: Case, poison: float) -> dict[str, Any] | None:
    """The case with everything poisoned that the op must not read; None where there is nothing such."""
    if op == "kda_step":
        owned = case["slots"][case["slots"] > 0]
        proj = case["proj"].clone()
        proj[case["slots"] == 0] = poison
        pools = {name: _filled_outside(case[name], owned, poison) for name in ("conv_state", "state")}
        return {**case, **pools, "proj": proj}
    if op == "kda_sequence":
        owned = torch.tensor([case["slot"]])
        return {**case, **{name: _filled_outside(case[name], owned, poison) for name in ("conv_state", "state")}}
    if op in ("mla_attend", "mla_attend_sequence"):
        return {**case, "cache": _poisoned_cache(op, case, poison)}
    if op in ("attn_res", "output_mix"):
        blocks = case["blocks"].clone()
        blocks[:, case["num_blocks"] :] = poison
        return {**case, "blocks": blocks}
    return None


def _filled_outside(pool: Tensor, owned: Tensor, poison: float) -> Tensor:
    filled = torch.full_like(pool, poison)
    filled[owned] = pool[owned]
    return filled


def _poisoned_cache(op: str, case: Case, poison: float) -> Tensor:
    """The latent cache with every row poisoned that no length reaches."""
    cache: Tensor = case["cache"]
    page = cache.shape[1]
    if op == "mla_attend":
        tables, lengths = case["block_table"], case["lengths"].tolist()
    else:
        tables, lengths = case["block_table"][None], [case["start"] + case["q"].shape[0]]
    read = torch.zeros(cache.shape[0] * page, dtype=torch.bool)
    for table, length in zip(tables, lengths, strict=True):
        positions = torch.arange(length)
        read[table[positions // page] * page + positions % page] = True
    # An E4M3 cache has no infinity and no 3e38; its NaN byte is the only poison it can hold.
    filler = E4M3_NAN if cache.dtype == torch.uint8 else poison
    poisoned = torch.full_like(cache, filler)
    poisoned.view(-1, cache.shape[-1])[read] = cache.view(-1, cache.shape[-1])[read]
    return poisoned


def _differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; a NaN equals a NaN of the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
