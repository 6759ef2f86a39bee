"""Making one more op known: its families, its exact result and its contract, from one file in `numerics/added/`.

The tables of `numerics.families`, `numerics.oracles` and `numerics.contracts` get one entry each; the numerics gate
then judges the op like every other, on any target that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numerics import contracts, families, oracles
from numerics.contracts import Contract, Expected
from numerics.families import Dims, Draw, shapes
from numerics.oracles import Case, Outputs


def register(
    op: str,
    *,
    cases: Sequence[str],
    make: Callable[[Draw, Dims, str, int], dict[str, Any]],
    oracle: Callable[[Case], Outputs],
    contract: Callable[[Case, Contract], dict[str, Expected]],
    sites: tuple[str, ...],
    levels: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Add op `op`. `cases`: its input families, the first plain random; `make(draw, dims, family, rows)` makes one.

    `oracle` gives the exact result in FP64, `contract` what may be stored, given the rounded `sites` of both paths.
    `levels`: what dimensions take in turn at every batch bin (see `numerics.families.shapes`); none: one shape alone.
    Raises ValueError for a name that is taken, or without families.
    """
    if op in families.FAMILIES:
        raise ValueError(f"op {op!r} is known already")
    if not cases:
        raise ValueError(f"op {op!r} needs at least one input family")
    families.add(op, tuple(cases), make)
    oracles.ORACLES[op] = oracle
    contracts.add(op, contract, Contract(sites))
    if levels:
        shapes.LEVELS[op] = dict(levels)
