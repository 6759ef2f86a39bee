"""Probes of the numerics gate: what a grid, a table or a long run shows and single random cases do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numerics.families import FAMILIES, NARROW_8, make_case
from numerics.families.probes import (
    CAST_ROWS,
    attention_grid,
    cast_cases,
    long_contexts,
    long_shards,
    same_bytes,
    sharded_grid,
)
from validation.gates.base import Context, Json, Unit
from validation.gates.numerics import captured, drift, limits
from validation.gates.numerics.judge import complaints
from validation.gates.numerics.measure import measure_case
from validation.targets.base import Capability, Case
from validation.targets.capture import NEEDS


@dataclass(frozen=True)
class Probe:
    """One kind of probe: the ops that it is about, its units, and how one is measured."""

    ops: Collection[str]
    units: Callable[[Sequence[str], bool], list[Unit]]
    measure: Callable[[Unit, Context], dict[str, Json]]
    needs: frozenset[Capability] = frozenset()

    def plan(self, ops: Sequence[str], context: Context) -> list[Unit]:
        """Units for these ops, at the depth of the settings; none where the target lacks what the probe needs."""
        able = context.target.capabilities >= self.needs
        return self.units(ops, context.settings["depth"] > 1) if able else []

    def known(self) -> list[dict[str, Json]]:
        """The parameters of every unit that the probe has at any depth."""
        return [dict(unit.params) for deep in (False, True) for unit in self.units(list(self.ops), deep)]


BINS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of every batch bin."""

GRID_SHAPE = ("page", "table_pages", "rows", "query_length", "fp8")
DCP_SHAPE = (*GRID_SHAPE, "ranks")


def _shaped(probe: str, ops: Sequence[str], names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Unit]:
    """A unit for every shape of every op, named by the shape's numbers."""
    return [
        Unit(
            f"probe-{probe}-" + "-".join(map(str, map(int, shape))),
            {"probe": probe, "op": op, **dict(zip(names, shape, strict=True))},
        )
        for op in ops
        for shape in shapes
    ]


def _attention(unit: Unit, context: Context, family: str, drawn: Iterable[Case]) -> dict[str, Json]:
    """Every drawn case of an attention op in both arms; those kept that fail, or the one that needs most."""
    baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
    op = unit.params["op"]
    cases = [
        {"family": family, "seed": context.seed} | measure_case(op, case, baseline, candidate, exact_contracts=False)
        for case in drawn
    ]
    ranks = f"{unit.params['ranks']} ranks, " if "ranks" in unit.params else ""
    page, table, query = (unit.params[name] for name in ("page", "table_pages", "query_length"))
    width = f"{len(cases)} cases, {ranks}page {page}, table of {table}, {query} rows a request,"
    return _result(unit, width, worst_of(op, cases))


def _cast_units(ops: Sequence[str], deep: bool) -> list[Unit]:
    return [Unit(f"probe-cast-{op}", {"probe": "cast", "op": op, "rows": CAST_ROWS}) for op in ops]


def _measure_cast(unit: Unit, context: Context) -> dict[str, Json]:
    """Every BF16 value through the path's own cache write."""
    wrong = {"baseline": 0, "candidate": 0}
    arms = {"baseline": context.target.open(context.baseline), "candidate": context.target.open(context.candidate)}
    for case, expected in cast_cases(context.seed):
        for name, arm in arms.items():
            cache = arm.run_op("mla_query", case)["cache"]
            rows = cache.view(-1, cache.shape[-1])[case["positions"], -expected.shape[-1] :]
            wrong[name] += int((~same_bytes(rows, expected)).sum())
    broken = {name: {"every BF16 value cast to its E4M3 byte": count} for name, count in wrong.items()}
    return _result(unit, "all 65,536 values", [empty_case("table", context.seed) | {"contracts": broken}])


def _grid_units(ops: Sequence[str], deep: bool) -> list[Unit]:
    shapes = [
        (page, table, rows, query, fp8)
        for page in ((4, 16) if deep else (4,))
        for table in ((3, 5, 16, 33) if deep else (3, 16))
        for rows in ((1, 2, 4, 8, 16, 32, 64) if deep else (1, 8, 64))
        for query in (range(1, 9) if deep else (1, 2, 5, 7, 8) if rows == 8 else (1, 2, 8))
        for fp8 in (((rows + query) % 2 == 0, rows == 8) if deep else (rows == 8,))
        if rows >= query and query <= 2 * page + 1
    ]
    if deep:
        # Each shape in one cache format, eight rows in both where it is another; the longest contexts at eight rows.
        shapes = [s for s in dict.fromkeys(shapes) if s[:2] != (16, 33) or s[2] == 8]
    return _shaped("grid", ops, GRID_SHAPE, shapes)


def _measure_grid(unit: Unit, context: Context) -> dict[str, Json]:
    """Every context up to two pages and one token, with a planted key at every boundary."""
    shape = {name: unit.params[name] for name in GRID_SHAPE}
    return _attention(unit, context, "boundaries", attention_grid(**shape, seed=context.seed))


def _long_units(ops: Sequence[str], deep: bool) -> list[Unit]:
    """Every split of the small bins alive, a rank's too, and contexts that end in their 65th page of 64 and beyond."""
    shapes = [(4, 256, 4, 1, False), (4, 128, 8, 1, False), (64, 65, 1, 1, True), (64, 65, 1, 1, False)]
    shards = [(1, 256, 4, 1, False, 2)]
    if deep:
        shapes += [(4, 256, 1, 1, True), (16, 512, 2, 1, False), (64, 256, 1, 1, False), (64, 65, 8, 4, True)]
        shards += [(1, 256, 4, 2, True, 8)]
    whole, sharded = ([op for op in ops if (op == "mla_attend_dcp") == dealt] for dealt in (False, True))
    return [*_shaped("long", whole, GRID_SHAPE, shapes), *_shaped("long", sharded, DCP_SHAPE, shards)]


def _measure_long(unit: Unit, context: Context) -> dict[str, Json]:
    """Contexts that fill the block table, with a planted key in one split after the other."""
    names, drawn = (DCP_SHAPE, long_shards) if "ranks" in unit.params else (GRID_SHAPE, long_contexts)
    shape = {name: unit.params[name] for name in names}
    return _attention(unit, context, "whole tables", drawn(**shape, seed=context.seed))


def _dcp_units(ops: Sequence[str], deep: bool) -> list[Unit]:
    shapes = [(1, 6, 8, 1, False, 2), (1, 6, 15, 5, True, 2), (1, 6, 14, 7, False, 2), (1, 6, 8, 1, False, 4)]
    if deep:
        # A wider query makes every context of eight ranks thousands of cases, which say no more than those of two do.
        places = [(2, 2, 1), (2, 2, 2), (2, 2, 8), (2, 3, 1), (2, 3, 2), (1, 8, 1)]
        shapes = [(page, 6, 8, query, query == 2, ranks) for page, ranks, query in places]
    return _shaped("dcp", ops, DCP_SHAPE, shapes)


def _measure_dcp(unit: Unit, context: Context) -> dict[str, Json]:
    """Every context up to a split and a page of all ranks, with a planted key wherever a rank's share changes."""
    shape = {name: unit.params[name] for name in DCP_SHAPE}
    return _attention(unit, context, "boundaries", sharded_grid(**shape, seed=context.seed))


def _coverage_units(ops: Sequence[str], deep: bool) -> list[Unit]:
    return [Unit(f"probe-coverage-{op}-n{n}", {"probe": "coverage", "op": op, "rows": n}) for op in ops for n in BINS]


def _measure_coverage(unit: Unit, context: Context) -> dict[str, Json]:
    """Rows that between them favour every one of 896 experts, or as many as fit: each must be chosen."""
    baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
    case = make_case("route", NARROW_8, "coverage", unit.params["rows"], context.seed)
    measured = measure_case("route", case, baseline, candidate)
    for arm, router in measured["router"].items():
        wanted = min(router["experts"], case["top_k"] * unit.params["rows"])
        measured["contracts"][arm]["every expert can be chosen"] = wanted - router["experts_hit"]
    return _result(unit, "896 experts", [{"family": "coverage", "seed": context.seed} | measured])


def empty_case(family: str, seed: int) -> dict[str, Any]:
    """A measured case with nothing in it yet."""
    return {
        "family": family,
        "seed": seed,
        "outputs": {},
        "histograms": {},
        "compliance": {"baseline": {}, "candidate": {}},
        "router": None,
        "contracts": {"baseline": {}, "candidate": {}},
    }


def worst_of(op: str, cases: list[dict[str, Any]], most: int = 5) -> list[dict[str, Any]]:
    """The cases with a reason to fail, `most` at most, or else the one that needs most of its bound."""
    failing = [case for case in cases if any(True for _ in complaints(op, case))]
    if failing:
        return failing[:most]
    return [
        max(cases, key=lambda case: max((x["used"] for x in case["compliance"]["candidate"].values()), default=0.0))
    ]


def _result(unit: Unit, width: str, cases: list[dict[str, Any]]) -> dict[str, Json]:
    return {**unit.params, "width": width, "cases": cases}


PROBES: Mapping[str, Probe] = {
    "cast": Probe(("mla_query",), _cast_units, _measure_cast),
    "grid": Probe(("mla_attend",), _grid_units, _measure_grid),
    "long": Probe(("mla_attend", "mla_attend_dcp"), _long_units, _measure_long),
    "dcp": Probe(("mla_attend_dcp",), _dcp_units, _measure_dcp),
    "coverage": Probe(("route",), _coverage_units, _measure_coverage),
    "limits": Probe(limits.OPS, limits.units, limits.measure),
    "drift": Probe(("kda_step",), drift.units, drift.measure),
    # One rank holds every context of the decode that is captured.
    "captured": Probe(
        tuple(op for op in FAMILIES if op != "mla_attend_dcp"),
        captured.units,
        captured.measure,
        NEEDS,
    ),
}
"""Probes by name, cheap ones first."""
