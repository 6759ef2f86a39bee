"""Input families: seeded cases of every op in docs/ops.md, from plain random ones to those that known
faults need.

A kernel that is right on independent normal inputs can be wrong on repeated keys, ties, saturation or
uneven lengths; each family here exists because a public wrong-result bug was invisible without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numerics.families import kda, linear, mla, mla_dcp, moe
from numerics.families.dims import K3_SHARD_8, K3_SHARD_16, MINI, NARROW_8, NARROW_16, Dims
from numerics.families.draw import GARBAGE, Draw
from numerics.families.shapes import SMALL

FAMILIES: dict[str, tuple[str, ...]] = {
    **linear.FAMILIES,
    **kda.FAMILIES,
    **mla.FAMILIES,
    **mla_dcp.FAMILIES,
    **moe.FAMILIES,
}
"""The families of every op. Each op's first is plain random."""

BRANCHES = linear.BRANCHES
"""Those of them that come at every batch bin, by op."""

_BUILDERS: dict[str, Callable[[Draw, Dims, str, int], dict[str, Any]]] = {
    op: getattr(module, op) for module in (linear, kda, mla, mla_dcp, moe) for op in module.FAMILIES
}


def add(op: str, names: tuple[str, ...], make: Callable[[Draw, Dims, str, int], dict[str, Any]]) -> None:
    """Add the families of one more op (see `numerics.extend`)."""
    FAMILIES[op], _BUILDERS[op] = names, make


def make_case(op: str, dims: Dims, family: str, rows: int, seed: int) -> dict[str, Any]:
    """A complete case of `op` on CPU: the inputs of docs/ops.md by name.

    dims: see `numerics.families.dims`; rows: n, or T for the sequence ops, at least 1; seed: same seed,
    same bits. Raises ValueError for an op, family, number of rows or dimensions that do not exist.
    """
    if op not in FAMILIES:
        raise ValueError(f"no families for op {op!r}; there are {', '.join(FAMILIES)}")
    if family not in FAMILIES[op]:
        raise ValueError(f"op {op!r} has no family {family!r}; it has {', '.join(FAMILIES[op])}")
    if rows < 1:
        raise ValueError(f"a case needs at least one row, got {rows}")
    try:
        draw = Draw(f"{op}/{family}", seed, FAMILIES[op].index(family))
        return _BUILDERS[op](draw, dims, family, rows)
    except KeyError as missing:
        raise ValueError(f"the dimensions for {op!r} lack {missing}") from None


__all__ = [
    "BRANCHES",
    "FAMILIES",
    "GARBAGE",
    "K3_SHARD_8",
    "K3_SHARD_16",
    "MINI",
    "NARROW_8",
    "NARROW_16",
    "SMALL",
    "Dims",
    "Draw",
    "add",
    "make_case",
]
