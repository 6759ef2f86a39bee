"""Exact contracts of an op: what must hold bit for bit, whatever the rounding.

Every figure is the number of elements that break a contract; zero is the only passing one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from numerics.formats import E4M3_NAN
from numerics.oracles import written
from validation.gates.numerics.poison import POISONS, PoisonedScratch, garbled_cases, poisoned, rows_of, widened
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
    "mla_attend_dcp": ("q", "block_table", "lengths"),
    "mla_value": ("latent", "gate"),
    "moe_front": ("x",),
    "route": ("logits",),
    "experts": ("z", "ids", "weights"),
    "shared_expert": ("x",),
    "moe_tail": ("latent", "shared"),
}
"""Inputs that have one entry per row (dotted groups by their stem); sequence ops have none, their rows are ordered."""

OWNERS = {"kda_step": "slots", "kda_verify": "sources", "mla_attend": "lengths", "mla_attend_dcp": "lengths"}
"""Inputs of which 0 says that a row, or a request of `kda_verify`, belongs to nobody; its output is zero."""

WRITERS = {"kda_step": "slots", "kda_verify": "sources", "mla_query": "positions"}
"""Inputs of the ops that write pools, an entry a row, of which 0 says that the row writes nothing."""

NOT_APPLICABLE = {"replay equals eager": "no path of this target replays a captured graph"}
"""Contracts that cannot be asked here, with the reason."""


def broken_contracts(op: str, case: Case, run: Run, placement: bool, clean: Outputs | None = None) -> dict[str, int]:
    """Broken elements by contract. `clean`: what the op gave on this case before, to save one run.

    `placement`: whether a row's bits must not depend on where it lies, its place in the batch or its stride. The
    generic path leaves elementary functions to the library, whose vectorised and scalar forms differ in the last bit.
    """
    clean, again = run(case) if clean is None else clean, run(case)
    pools = written(op, case)
    wide_case = widened(op, case)
    wide = run(wide_case)
    counts = {
        "unowned bytes unchanged": _changed_outside(case, clean, pools),
        "inputs unchanged": _changed_inputs(case, wide_case, pools),
        "row padding unchanged": sum(_padding_changed(wide_case[pool], wide[pool]) for pool in pools),
        "same bits twice": _differences(clean, again),
        "null rows zero": _null_rows_not_zero(op, case, clean),
        "poison ignored": _poison_leaks(op, case, run, clean, pools),
        "outputs fully written": _unwritten(case, run, clean),
        **_garbled_rows(op, case, run, clean, pools),
    }
    if (nobodys := _of_nobody(op, case)) is not None:
        idle = run(nobodys)
        counts["null rows zero"] += _null_rows_not_zero(op, nobodys, idle)
        counts["unowned bytes unchanged"] += sum(differing(case[pool], idle[pool]) for pool in pools)
    if placement:
        counts["strided views"] = _differences(clean, wide)
    if placement and op in ROW_INPUTS:
        counts["row order free"] = _differences(clean, _in_reversed_order(op, case, run, pools))
    return counts


def _changed_outside(case: Case, outputs: Outputs, pools: Outputs) -> int:
    """Pool elements outside the rows that the op owns whose bits changed; the null slot and page are among them."""
    return sum(differing(case[pool][~mask], outputs[pool][~mask]) for pool, mask in pools.items())


def _changed_inputs(case: Case, wide: Case, pools: Outputs) -> int:
    """Elements of the inputs with gaps that the op changed; those of dense ones are counted where both arms are run."""
    inputs = [name for name in case if wide[name] is not case[name] and name not in pools]
    return sum(differing(case[name], wide[name]) for name in inputs)


def _padding_changed(given: Tensor, pool: Tensor) -> int:
    """Elements between the rows of a pool with gaps that no longer hold what `widened` put there."""
    before, after = _storage(given), _storage(pool)
    between = torch.ones_like(before, dtype=torch.bool)
    between.as_strided(given.size(), given.stride(), given.storage_offset()).fill_(False)
    return differing(before[between], after[between])


def _storage(x: Tensor) -> Tensor:
    """All elements of the tensor that `x` is a view of."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _null_rows_not_zero(op: str, case: Case, outputs: Outputs) -> int:
    """Elements that are not zero in rows which belong to nobody (slot 0, or no key to see)."""
    if op not in OWNERS:
        return 0
    nobodys = _nobodys(op, case)
    out = outputs["latent" if op.startswith("mla") else "y"].unflatten(0, (nobodys.shape[0], -1))
    return int((out[nobodys] != 0).sum())


def _of_nobody(op: str, case: Case) -> Case | None:
    """The case with rows that all belong to nobody, as those that fill up a verify step; None where there are none."""
    if op not in OWNERS:
        return None
    owners = (OWNERS[op], "targets") if op == "kda_verify" else (OWNERS[op],)
    return {**case, **{name: torch.zeros_like(case[name]) for name in owners}}


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


def _garbled_rows(op: str, case: Case, run: Run, clean: Outputs, pools: Outputs) -> dict[str, int]:
    """What rows of NaNs do: nothing to the others, and their own outputs are NaN, or someone will trust them.

    "rows kept apart": elements of other rows, and of pools that other rows own or nobody does, whose bits change, and
    ids that name no expert. "NaN stays NaN": elements of garbled rows, and of what they wrote into pools, that are no
    NaN. Rows that belong to nobody are zero, whatever they hold.
    """
    spread, hidden = 0, 0
    for spoiled, rows in garbled_cases(op, case):
        dirty = run(spoiled)
        for name in clean.keys() - pools.keys():
            own = rows.repeat_interleave(clean[name].shape[0] // rows.shape[0])
            spread += differing(clean[name][~own], dirty[name][~own])
            if op != "route":
                live = own & ~_nobodys(op, case).repeat_interleave(own.shape[0] // rows.shape[0])
                hidden += int((~_nan(dirty[name][live])).sum())
        for pool, own in (_written_by(op, case, rows) if pools else {}).items():
            spread += differing(clean[pool][~own], dirty[pool][~own])
            # A window of the convolution has older tokens in it, which were none.
            newest = dirty[pool][own][..., -1:] if pool == "conv_state" else dirty[pool][own]
            hidden += int((~_nan(newest)).sum())
        if op == "route":
            spread += int(((dirty["ids"] < 0) | (dirty["ids"] >= case["logits"].shape[-1])).sum())
    return {"rows kept apart": spread, "NaN stays NaN": hidden}


def _written_by(op: str, case: Case, rows: Tensor) -> Outputs:
    """Which entries of each pool these rows write, as `written` says of all of them."""
    place = WRITERS[op]
    return written(op, {**case, place: torch.where(rows, case[place], 0)})


def _nan(x: Tensor) -> Tensor:
    """Where a BF16, FP32 or E4M3 value is no number."""
    return x & 0x7F == E4M3_NAN if x.dtype == torch.uint8 else x.isnan()


def _nobodys(op: str, case: Case) -> Tensor:
    """Rows that belong to nobody, bool; requests for `kda_verify`."""
    return case[OWNERS[op]] == 0 if op in OWNERS else torch.zeros(rows_of(op, case), dtype=torch.bool)


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
