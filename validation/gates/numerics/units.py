"""The numerics gate's units: which op at which width and row count, and how one is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from numerics.families import BRANCHES, FAMILIES, make_case, shapes
from validation.gates.base import Context, Json, Unit
from validation.gates.numerics.dims import MODEL, SHAPES, TRUE_WIDTHS, Drawn, dims_of
from validation.gates.numerics.measure import SEQUENCE_OPS, measure_case
from validation.gates.numerics.probes import BINS, PROBES

MAX_ROWS = 64
"""Rows of the largest specialised step, drafts included."""

SMALL_BATCH = 2
"""Rows up to which a batch is not large."""


DEFAULTS: dict[str, Json] = {
    "verify_rows": [1],
    "verify_widths": [4],
    "verify_steps": [],
    "shape_rows": [],
    "families": "all",
    "probes": [],
    "depth": 1,
    "replay": [],
}
"""Settings that a profile may leave out."""


def unasked(settings: Mapping[str, Json]) -> str | None:
    """Why these settings (valid ones) would leave an op without a unit, in one line; None where they do not.

    Only `kda_verify` can be: its row counts and widths must fit together, every other op's are its units' own.
    """
    s = {**DEFAULTS, **settings}
    over_shapes = any(n > 1 for n in s["shape_rows"])
    if "kda_verify" not in s.get("ops", FAMILIES) or over_shapes or _verify_pairs(s, 0):
        return None
    return (
        f"no unit would measure kda_verify: none of verify_rows {s['verify_rows']} times any of verify_widths "
        f"{s['verify_widths']} stays within {MAX_ROWS} rows; give smaller ones, or a step in verify_steps"
    )


def with_defaults(context: Context) -> Context:
    """The context with every setting present."""
    return replace(context, settings={**DEFAULTS, **context.settings})


def plan_units(context: Context) -> list[Unit]:
    """Units in order: replays of earlier failures, ops at the model's width, at fixed widths, over shapes, probes."""
    settings = context.settings
    ops = settings.get("ops", sorted(FAMILIES))
    units = [_replay(index, case) for index, case in enumerate(settings["replay"])]
    for op in ops:
        units += _units_of(op, MODEL, settings["sequence_rows" if op in SEQUENCE_OPS else "rows"], context)
        if op not in SEQUENCE_OPS:
            units += [u for width in settings["shards"] for u in _units_of(op, width, settings["shard_rows"], context)]
        if op in shapes.LEVELS:
            units += [
                Unit(f"{op}-{SHAPES}-n{n}", {"op": op, "width": SHAPES, "rows": n, "place": place})
                for place, n in enumerate(settings["shape_rows"])
                if op != "kda_verify" or n > 1
            ]
    for name in settings["probes"]:
        units += PROBES[name].plan([op for op in ops if op in PROBES[name].ops], context)
    return units


def measure_unit(unit: Unit, context: Context) -> dict[str, Json]:
    """The result of one unit: op, width, rows and measured cases."""
    if "probe" in unit.params:
        seed = unit.params.get("seed", context.seed)
        result = PROBES[unit.params["probe"]].measure(unit, replace(context, seed=seed))
        return {**result, "replay": {**unit.params, "seed": seed}}
    op, width = unit.params["op"], unit.params["width"]
    baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
    cases = [
        drawn.named()
        | measure_case(
            op,
            make_case(op, dims_of(width, op, drawn, context.target), drawn.family, drawn.rows, drawn.seed),
            baseline,
            candidate,
        )
        for drawn in _drawn(unit, context)
    ]
    return {**unit.params, "cases": cases}


def _drawn(unit: Unit, context: Context) -> Iterator[Drawn]:
    """The cases of a unit that is no probe."""
    p = unit.params
    if "family" in p:
        yield Drawn(p["family"], p["rows"], p["seed"], p.get("verify_width"), p.get("shape"))
        return
    for seed in (context.seed * 1000 + repeat for repeat in range(context.settings["seeds"])):
        if p["width"] == SHAPES:
            yield from _over_shapes(p["op"], p["rows"], p["place"], seed)
            continue
        width = p.get("verify_width")
        turn = _in_turn(p["width"], p["rows"] * (width or 1), context.settings["families"])
        families = _families(p["op"], p["rows"], p["rows"] + seed if turn else None)
        for family in dict.fromkeys((*families, *_branches(p["op"], p["width"], p["rows"]))):
            yield Drawn(family, p["rows"], seed, width)


def _over_shapes(op: str, rows: int, place: int, seed: int) -> Iterator[Drawn]:
    """Cases of one batch bin, the `place`-th of the plan.

    Shapes move on from case to case. Families move on by one a bin, and from case to case by so many that the cases of
    one bin are spread over all of them: no family stays with one shape.
    """
    families, count = FAMILIES[op], shapes.cases(op)
    stride = -(-len(families) // count)
    for case in range(count):
        turn = place * count + case + seed
        family = families[(place + case * stride + seed) % len(families)]
        if op == "kda_verify":
            width = min(shapes.shape(op, turn)["verify_width"], rows)
            yield Drawn(family, rows // width, seed, width, turn)
        else:
            yield Drawn(family, rows, seed, None, turn)


def _in_turn(width: str, rows: int, setting: str) -> bool:
    """Whether only some families are measured: where so set, and at true widths, where a case takes seconds."""
    return setting == "in turn" or width in TRUE_WIDTHS or (setting != "all" and rows > SMALL_BATCH)


def _families(op: str, rows: int, turn: int | None) -> Sequence[str]:
    """All families of an op, or the plain ones, of every cache format, and another, whose turn it is.

    Row counts below a batch bin's own run in the kernel of that bin: one family is enough.
    """
    every = FAMILIES[op]
    if turn is None:
        return every
    if op not in SEQUENCE_OPS and rows not in BINS:
        return (every[turn % len(every)],)
    plain = [family for family in every if family.startswith("iid")] or [every[0]]
    others = [family for family in every if family not in plain]
    return (*plain, others[turn % len(others)]) if others else every


def _branches(op: str, width: str, rows: int) -> Sequence[str]:
    """Families that come in any case: the other ways through an op, at the model's width and every bin."""
    return BRANCHES.get(op, ()) if width == MODEL and rows in BINS else ()


def _units_of(op: str, width: str, rows: Sequence[int], context: Context) -> list[Unit]:
    """`kda_verify` has its own row counts; at a shard's width the widest step of one request is enough."""
    if op != "kda_verify":
        return [Unit(f"{op}-{width}-n{n}", {"op": op, "width": width, "rows": n}) for n in rows]
    pairs = _verify_pairs(context.settings, context.seed)
    if width != MODEL:
        pairs = [(1, max(context.settings["verify_widths"]))]
    return [Unit(f"{op}-{width}-n{n}-w{w}", {"op": op, "width": width, "rows": n, "verify_width": w}) for n, w in pairs]


def _verify_pairs(settings: Mapping[str, Json], seed: int) -> list[tuple[int, int]]:
    """Requests and width of verify steps: all pairs, or, where families take turns, one row count a width in turn.

    The steps that the settings name come in any case.
    """
    pairs = []
    for place, width in enumerate(settings["verify_widths"]):
        fitting = [n for n in settings["verify_rows"] if n * width <= MAX_ROWS]
        if settings["families"] != "all" and fitting:
            fitting = [fitting[(place + seed) % len(fitting)]]
        pairs += [(n, width) for n in fitting]
    return list(dict.fromkeys([*pairs, *map(tuple, settings["verify_steps"])]))


def _replay(index: int, case: Mapping[str, Json]) -> Unit:
    return Unit(f"replay-{index:03}-{case['op']}-{case.get('family', case.get('probe'))}", dict(case))
