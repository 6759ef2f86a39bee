"""The numerics gate's units: which op at which width and row count, and how one is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from numerics.families import FAMILIES, K3_SHARD_8, K3_SHARD_16, NARROW_8, NARROW_16, SMALL, Dims, make_case, shapes
from validation.gates.base import Context, Json, Unit
from validation.gates.numerics_measure import SEQUENCE_OPS, measure_case
from validation.gates.numerics_probes import BINS, PROBES
from validation.targets.base import Target

MODEL, SHAPES = "model", "shapes"
WIDTHS: dict[str, Dims] = {
    "k3_shard_8": K3_SHARD_8,
    "k3_shard_16": K3_SHARD_16,
    "narrow_8": NARROW_8,
    "narrow_16": NARROW_16,
}
"""Per-rank widths of the big model: true ones, and its numbers of heads, ranks, experts and blocks at small widths."""

TRUE_WIDTHS = ("k3_shard_8", "k3_shard_16")

MAX_ROWS = 64
"""Rows of the largest specialised step, drafts included."""

KDA_HEAD_ROWS = 32
"""Rows times KDA heads of a case at model width, at most: states are the costly part, and heads do not interact."""

RANKS_ROWS = 128
"""Rows times ranks of attention over a sharded context, at most: rows and ranks do not interact, and each costs."""

RANKS = (8, 1, 2, 4, 16)
"""Ranks of a case at model width, in turn by its rows, family and seed."""

SMALL_BATCH = 2
"""Rows up to which a batch is not large."""


DEFAULTS: dict[str, Json] = {
    "verify_rows": [1],
    "verify_widths": [4],
    "shape_rows": [],
    "families": "all",
    "probes": [],
    "depth": 1,
    "replay": [],
}
"""Settings that a profile may leave out."""


@dataclass(frozen=True)
class Drawn:
    """One case to draw. `shape` is the turn of `numerics.families.shapes`, None at a fixed width."""

    family: str
    rows: int
    seed: int
    verify_width: int | None = None
    shape: int | None = None

    def named(self) -> dict[str, Json]:
        """What the result says of the case, and a replay needs."""
        given = {"family": self.family, "rows": self.rows, "seed": self.seed}
        optional = {"verify_width": self.verify_width, "shape": self.shape}
        return given | {name: value for name, value in optional.items() if value is not None}


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
        for family in _families(p["op"], p["rows"], p["rows"] + seed if turn else None):
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


def dims_of(width: str, op: str, drawn: Drawn, target: Target) -> Dims:
    """Dimensions of a case."""
    if drawn.shape is not None:
        given = {} if drawn.verify_width is None else {"verify_width": drawn.verify_width}
        return {**SMALL, **shapes.shape(op, drawn.shape), **given}
    dims = dict(_model_dims(target) if width == MODEL else WIDTHS[width])
    if drawn.verify_width is not None:
        dims["verify_width"] = drawn.verify_width
    if width == MODEL:
        turn = drawn.rows + drawn.seed + FAMILIES[op].index(drawn.family)
        dims["ranks"] = RANKS[turn % len(RANKS)]
        dims["blocks_used"] = 1 + turn % dims["attn_res_blocks"]
    if op == "mla_attend_dcp":
        dims["ranks"] = min(dims["ranks"], RANKS_ROWS // drawn.rows)
    if width == MODEL and op in ("kda_step", "kda_verify"):
        most = KDA_HEAD_ROWS // (drawn.rows * (drawn.verify_width or 1))
        dims["kda_num_heads"] = max(1, min(dims["kda_num_heads"], most))
    return dims


def _units_of(op: str, width: str, rows: Sequence[int], context: Context) -> list[Unit]:
    """`kda_verify` has its own row counts; at a shard's width the widest step of one request is enough."""
    if op != "kda_verify":
        return [Unit(f"{op}-{width}-n{n}", {"op": op, "width": width, "rows": n}) for n in rows]
    pairs = _verify_pairs(context.settings, context.seed)
    if width != MODEL:
        pairs = [(1, max(context.settings["verify_widths"]))]
    return [Unit(f"{op}-{width}-n{n}-w{w}", {"op": op, "width": width, "rows": n, "verify_width": w}) for n, w in pairs]


def _verify_pairs(settings: Mapping[str, Json], seed: int) -> list[tuple[int, int]]:
    """Requests and width of verify steps: all pairs, or, where families take turns, one row count a width in turn."""
    pairs = []
    for place, width in enumerate(settings["verify_widths"]):
        fitting = [n for n in settings["verify_rows"] if n * width <= MAX_ROWS]
        if settings["families"] != "all" and fitting:
            fitting = [fitting[(place + seed) % len(fitting)]]
        pairs += [(n, width) for n in fitting]
    return pairs


def _replay(index: int, case: Mapping[str, Json]) -> Unit:
    return Unit(f"replay-{index:03}-{case['op']}-{case.get('family', case.get('probe'))}", dict(case))


def _model_dims(target: Target) -> Dims:
    """The target's own dimensions under the names of the input families."""
    d = target.dims()
    return {
        **d,
        "kda_num_heads": d["linear_attn_num_heads"],
        "kda_head_dim": d["linear_attn_head_dim"],
        "num_experts_per_token": d["num_experts_per_token"],
        "experts_held": min(d["num_experts"], 32),
        "shared_intermediate_size": d["num_shared_experts"] * d["moe_intermediate_size"],
        "attn_res_blocks": -(-d["num_hidden_layers"] // d["attn_res_block_size"]),
        "page_size": 16,
        "projection_size": 320,
    }
