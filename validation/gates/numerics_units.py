"""The numerics gate's units: which op at which width and row count, and how one is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numerics.families import FAMILIES, K3_SHARD_8, K3_SHARD_16, NARROW_8, NARROW_16, Dims, make_case
from validation.gates.base import Context, Json, Unit
from validation.gates.numerics_measure import SEQUENCE_OPS, measure_case
from validation.gates.numerics_probes import PROBES
from validation.gates.settings import Rule
from validation.targets.base import Target

MODEL = "model"
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

RANKS = (8, 1, 2, 4, 16)
"""Ranks of a case at model width, in turn by its rows."""

SMALL_BATCH = 2
"""Rows up to which a batch is not large."""


DEFAULTS: dict[str, Json] = {
    "verify_rows": [1],
    "verify_widths": [4],
    "families": "all",
    "probes": [],
    "depth": 1,
    "replay": [],
}
"""Settings that a profile may leave out."""


def with_defaults(context: Context) -> Context:
    """The context with every setting present."""
    return replace(context, settings={**DEFAULTS, **context.settings})


def plan_units(context: Context) -> list[Unit]:
    """Units in order: replays of earlier failures, ops at the model's widths, at the shards' widths, probes."""
    settings = context.settings
    ops = settings.get("ops", sorted(FAMILIES))
    units = [_replay(index, case) for index, case in enumerate(settings["replay"])]
    for op in ops:
        units += _units_of(op, MODEL, settings["sequence_rows" if op in SEQUENCE_OPS else "rows"], settings)
        if op not in SEQUENCE_OPS:
            units += [u for width in settings["shards"] for u in _units_of(op, width, settings["shard_rows"], settings)]
    for name in settings["probes"]:
        units += PROBES[name].plan([op for op in ops if op in PROBES[name].ops], context)
    return units


def measure_unit(unit: Unit, context: Context) -> dict[str, Json]:
    """The result of one unit: op, width, rows and measured cases."""
    if "probe" in unit.params:
        return PROBES[unit.params["probe"]].measure(unit, context)
    op, width, rows = unit.params["op"], unit.params["width"], unit.params["rows"]
    dims = dims_of(width, op, rows, unit.params.get("verify_width"), context.target)
    if "family" in unit.params:
        drawn = [(unit.params["family"], unit.params["seed"])]
    else:
        seeds = [context.seed * 1000 + repeat for repeat in range(context.settings["seeds"])]
        turn = _in_turn(width, rows * unit.params.get("verify_width", 1), context.settings["families"])
        drawn = [(family, seed) for seed in seeds for family in _families(op, rows + seed if turn else None)]
    baseline, candidate = context.target.open(context.baseline), context.target.open(context.candidate)
    cases = [
        {"family": family, "seed": seed}
        | measure_case(op, make_case(op, dims, family, rows, seed), baseline, candidate)
        for family, seed in drawn
    ]
    return {**unit.params, "cases": cases}


def _in_turn(width: str, rows: int, setting: str) -> bool:
    """Whether only some families are measured: where so set, and at true widths, where a case takes seconds."""
    return setting == "in turn" or width in TRUE_WIDTHS or (setting != "all" and rows > SMALL_BATCH)


def _families(op: str, turn: int | None) -> Sequence[str]:
    """All families of an op, or the plain one and another, whose turn it is."""
    every = FAMILIES[op]
    return every if turn is None or len(every) < 2 else (every[0], every[1 + turn % (len(every) - 1)])


def dims_of(width: str, op: str, rows: int, verify_width: int | None, target: Target) -> Dims:
    """Dimensions of a unit's cases."""
    dims = dict(_model_dims(target) if width == MODEL else WIDTHS[width])
    if verify_width is not None:
        dims["verify_width"] = verify_width
    if width == MODEL:
        dims["ranks"] = RANKS[rows % len(RANKS)]
    if width == MODEL and op in ("kda_step", "kda_verify"):
        most = KDA_HEAD_ROWS // (rows * (verify_width or 1))
        dims["kda_num_heads"] = max(1, min(dims["kda_num_heads"], most))
    return dims


def replays() -> Rule:
    """A list of tables that name single cases, as `failing_cases` in the metrics of an earlier run lists them."""

    def rule(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list of cases is needed"
        return next((reason for case in value if (reason := replay_error(case))), None)

    return rule


def replay_error(case: Any) -> str | None:
    """Why a table does not name a single case, or None."""
    needed = {"op": str, "width": str, "rows": int, "family": str, "seed": int}
    if not isinstance(case, dict) or any(type(case.get(key)) is not kind for key, kind in needed.items()):
        return f"each case needs {', '.join(needed)}"
    if unknown := set(case) - {*needed, "verify_width"}:
        return f"a case has no {', '.join(sorted(unknown))}"
    if case["op"] not in FAMILIES or case["family"] not in FAMILIES[case["op"]]:
        return f"there is no family {case['family']!r} of op {case['op']!r}"
    if case["width"] not in (MODEL, *WIDTHS):
        return f"there is no width {case['width']!r}"
    if not 1 <= case["rows"] <= 512 or ("verify_width" in case) != (case["op"] == "kda_verify"):
        return "rows must be 1 to 512, and kda_verify alone has a verify_width"
    width = case.get("verify_width", 1)
    if type(width) is not int or not 1 <= width * case["rows"] <= MAX_ROWS * 8:
        return (
            f"verify_width is {width!r}, a whole number of 1 or more with at most {MAX_ROWS * 8} rows in all is needed"
        )
    return None


def _units_of(op: str, width: str, rows: Sequence[int], settings: Mapping[str, Json]) -> list[Unit]:
    """`kda_verify` has its own row counts; at a shard's width the widest step of one request is enough."""
    if op != "kda_verify":
        return [Unit(f"{op}-{width}-n{n}", {"op": op, "width": width, "rows": n}) for n in rows]
    pairs = [(n, w) for w in settings["verify_widths"] for n in settings["verify_rows"] if n * w <= MAX_ROWS]
    if width != MODEL:
        pairs = [(1, max(settings["verify_widths"]))]
    return [Unit(f"{op}-{width}-n{n}-w{w}", {"op": op, "width": width, "rows": n, "verify_width": w}) for n, w in pairs]


def _replay(index: int, case: Mapping[str, Json]) -> Unit:
    return Unit(f"replay-{index:03}-{case['op']}-{case['family']}", dict(case))


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
