"""The numerics gate's cases: which dimensions one has at a width, or at the shape whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass

from numerics.families import FAMILIES, K3_SHARD_8, K3_SHARD_16, NARROW_8, NARROW_16, SMALL, Dims, shapes
from validation.gates.base import Json
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

KDA_HEAD_ROWS = 32
"""Rows times KDA heads of K3's head size in one case, at most, but for a second head: states are the costly part, and
heads do not interact. Cases over shapes have K3's head size up to there and a smaller one beyond."""

RANKS_ROWS = 64
"""Rows times ranks of attention over a sharded context at model width, at most: rows and ranks do not interact, and
each costs. Over shapes all eight ranks come at every bin."""

SHARED_HEAD_ROWS = 384
"""Rows times heads of attention over a sharded context, at most, but for 12 heads: all 96 come at up to four rows."""

RANKS = (8, 1, 2, 4, 16)
"""Ranks of a case at model width, in turn by its rows, family and seed."""


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


def dims_of(width: str, op: str, drawn: Drawn, target: Target) -> Dims:
    """Dimensions of a case."""
    tokens = drawn.rows * (drawn.verify_width or 1)
    if drawn.shape is not None:
        given = {} if drawn.verify_width is None else {"verify_width": drawn.verify_width}
        return _affordable(op, {**SMALL, **shapes.shape(op, drawn.shape, tokens), **given}, tokens)
    dims = dict(_model_dims(target) if width == MODEL else WIDTHS[width])
    if drawn.verify_width is not None:
        dims["verify_width"] = drawn.verify_width
    if width == MODEL:
        turn = drawn.rows + drawn.seed + FAMILIES[op].index(drawn.family)
        dims["ranks"] = RANKS[turn % len(RANKS)]
        dims["blocks_used"] = 1 + turn % dims["attn_res_blocks"]
    if op == "mla_attend_dcp":
        dims["ranks"] = max(1, min(dims["ranks"], RANKS_ROWS // drawn.rows))
    if width == MODEL and op in ("kda_step", "kda_verify"):
        most = max(2 if tokens <= KDA_HEAD_ROWS else 1, KDA_HEAD_ROWS // tokens)
        dims["kda_num_heads"] = min(dims["kda_num_heads"], most)
    return dims


def _affordable(op: str, dims: dict[str, int], tokens: int) -> dict[str, int]:
    """Dimensions over shapes with K3's KDA head size where it costs little, and as many shared heads as do."""
    if op in ("kda_step", "kda_verify") and tokens * dims["kda_num_heads"] <= KDA_HEAD_ROWS:
        return {**dims, "kda_head_dim": K3_SHARD_8["kda_head_dim"]}
    if op == "mla_attend_dcp":
        most = max(K3_SHARD_8["num_attention_heads"], SHARED_HEAD_ROWS // tokens)
        return {**dims, "num_attention_heads": min(dims["num_attention_heads"], most)}
    return dims


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
