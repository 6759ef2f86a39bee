"""Exact contracts of an op: what must hold bit for bit, whatever the rounding.

Every figure is the number of elements that break a contract; zero is the only passing one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from numerics.oracles import written
from validation.gates.numerics_poison import POISONS, PoisonedScratch, garbled_row, poisoned, widened
from validation.targets.base import Case

Outputs = dict[str, Tensor]
Run = Callable[[Case], Outputs]
"""Runs the op on a case without changing it."""

ROW_INPUTS: dict[str, tuple[str, ...]] = {
    "projection": ("x",),
    "rms_norm": ("x",),
    "all_reduce": ("y",),
    "attn_res": ("prefix", "delta", "blocks"),
    "output_mix": ("prefix", "blocks", "y"),
    "kda_step": ("proj", "slots"),
    "kda_verify": ("proj", "sources", "targets"),
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

NOT_APPLICABLE = {"replay equals eager": "no path of this target replays a captured graph"}
"""Contracts that cannot be asked here, with the reason."""


def broken_contracts(op: str, case: Case, run: Run, placement: bool) -> dict[str, int]:
    """Broken elements by contract.

    `placement`: whether a row's bits must not depend on where it lies, its place in the batch or its stride. The
    generic path leaves elementary functions to the library, whose vectorised and scalar forms differ in the last bit.
    """
    clean, again = run(case), run(case)
    pools = written(op, case)
    wide = run(widened(op, case))
    counts = {
        "unowned bytes unchanged": _changed_outside(case, clean, pools),
        "row padding unchanged": sum(_padding_changed(wide[pool]) for pool in pools),
        "same bits twice": _differences(clean, again),
        "null rows zero": _null_rows_not_zero(op, case, clean),
        "poison ignored": _poison_leaks(op, case, run, clean, pools),
        "outputs fully written": _unwritten(case, run, clean),
        "rows kept apart": _garbage_spreads(op, case, run, clean, pools),
    }
    if placement:
        counts["strided views"] = _differences(clean, wide)
    if placement and op in ROW_INPUTS:
        counts["row order free"] = _differences(clean, _in_reversed_order(op, case, run, pools))
    return counts


def _changed_outside(case: Case, outputs: Outputs, pools: Outputs) -> int:
    """Pool elements outside the rows that the op owns whose bits changed; the null slot and page are among them."""
    return sum(differing(case[pool][~mask], outputs[pool][~mask]) for pool, mask in pools.items())


def _padding_changed(pool: Tensor) -> int:
    """Elements between the rows of a pool with gaps that no longer hold what `widened` put there (zeros)."""
    elements = pool.untyped_storage().nbytes() // pool.element_size()
    everything = pool.as_strided((elements,), (1,), 0)
    return int(everything.count_nonzero()) - int(pool.count_nonzero())


def _null_rows_not_zero(op: str, case: Case, outputs: Outputs) -> int:
    """Elements that are not zero in rows which belong to nobody (slot 0, or no key to see)."""
    if op == "kda_step":
        return int((outputs["y"][case["slots"] == 0] != 0).sum())
    if op == "kda_verify":
        by_request = outputs["y"].unflatten(0, (-1, case["targets"].shape[1]))
        return int((by_request[case["sources"] == 0] != 0).sum())
    if op == "mla_attend":
        return int((outputs["latent"][case["lengths"] == 0] != 0).sum())
    return 0


def _in_reversed_order(op: str, case: Case, run: Run, pools: Outputs) -> Outputs:
    """Outputs with the rows given in the opposite order, put back in order."""
    width = case["targets"].shape[1] if op == "kda_verify" else 1
    turned = {
        key: _reversed(value, width if key == "proj" else 1)
        if key.split(".")[0] in ROW_INPUTS[op] and isinstance(value, Tensor)
        else value
        for key, value in case.items()
    }
    outputs = run(turned)
    return {name: x if name in pools else _reversed(x, width) for name, x in outputs.items()}


def _reversed(x: Tensor, width: int) -> Tensor:
    """Groups of `width` rows in the opposite order."""
    turned: Tensor = x.unflatten(0, (-1, width)).flip(0).flatten(0, 1)
    return turned


def _poison_leaks(op: str, case: Case, run: Run, clean: Outputs, pools: Outputs) -> int:
    """Elements of the op's own outputs whose bits change when everything it must not read is poisoned."""
    leaks = 0
    for poison in POISONS.values():
        spoiled = poisoned(op, case, poison)
        if spoiled is not None:
            leaks += sum(differing(a, b) for a, b in _owned(clean, run(spoiled), pools))
    return leaks


def _unwritten(case: Case, run: Run, clean: Outputs) -> int:
    """Elements whose bits depend on what freshly allocated memory held: outputs left unwritten, scratch read early."""
    with PoisonedScratch(math.nan):
        dirty = run(case)
    return _differences(clean, dirty)


def _garbage_spreads(op: str, case: Case, run: Run, clean: Outputs, pools: Outputs) -> int:
    """Elements of the other rows whose bits change when one row holds NaNs, and its ids that name no expert."""
    garbled = garbled_row(op, case)
    if garbled is None:
        return 0
    spoiled, row = garbled
    dirty = run(spoiled)
    broken = 0
    for name, value in clean.items():
        if name not in pools:
            others = torch.ones(value.shape[0], dtype=torch.bool)
            others[row] = False
            broken += differing(value[others], dirty[name][others])
    if op == "route":
        broken += int(((dirty["ids"] < 0) | (dirty["ids"] >= case["logits"].shape[-1])).sum())
    return broken


def _owned(a: Outputs, b: Outputs, pools: Outputs) -> Iterator[tuple[Tensor, Tensor]]:
    for name, value in a.items():
        rows: Any = pools.get(name, slice(None))
        yield value[rows], b[name][rows]


def _differences(a: Outputs, b: Outputs) -> int:
    return sum(differing(a[name], b[name]) for name in a)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; a NaN equals a NaN of the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
