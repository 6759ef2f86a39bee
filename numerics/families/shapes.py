"""Shapes that an op's cases take in turn: every number of heads, ranks, blocks and experts at every batch bin.

A kernel is chosen by its shape as well as by its batch bin, and each choice can be wrong alone. `cases(op)` cases a bin
go through the levels of that op, the next bin goes on where the last one stopped, and the next seed starts one further.

A kernel that loops over its width is right where one turn of the loop is enough, so every op has K3's true widths among
its levels, one after the other, at as many bins as they are cheap at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from numerics.families.dims import K3_SHARD_8, NARROW_8, Dims
from numerics.formats import MXFP4_BLOCK

SMALL: Dims = MappingProxyType(
    {**NARROW_8, "v_head_dim": 64, "routed_expert_hidden_size": 96, "moe_intermediate_size": 32, "verify_width": 2}
)
"""Widths that make a case cheap at 64 rows; what an op has levels of is set by them."""

Levels = dict[str, tuple[int, ...]]
"""Values that dimensions take in turn, by the dimension's name."""

_HEADS: Levels = {"num_attention_heads": (12, 6)}
_KDA_HEADS: Levels = {"kda_num_heads": (12, 6)}
_RANKS: Levels = {"ranks": (8, 1, 16, 2, 4)}
_BLOCKS: Levels = {"blocks_used": (7, 1, 4, 6, 3, 5, 2, 8)}
_HIDDEN: Levels = {"hidden_size": (256, 7168, 448)}
_LATENT: Levels = {"kv_lora_rank": (128, 512)}

LEVELS: dict[str, Levels] = {
    "projection": {"projection_size": (192, 328), "hidden_size": (256, 7168)},
    "rms_norm": {"hidden_size": (448, 7168)},
    "all_reduce": _RANKS | _HIDDEN,
    "attn_res": _BLOCKS | _HIDDEN,
    "output_mix": _RANKS | _BLOCKS | _HEADS | _HIDDEN,
    "kda_step": _KDA_HEADS,
    "kda_verify": _KDA_HEADS | {"verify_width": (8, 3, 5, 2, 7, 4, 6)},
    "mla_query": _HEADS | _LATENT | {"q_lora_rank": (96, 1536), "qk_nope_head_dim": (64, 128), "page_size": (16, 64)},
    "mla_attend": _HEADS | _LATENT | {"page_size": (16, 64)},
    "mla_attend_dcp": {"ranks": (8, 2), "num_attention_heads": (96, 12), "page_size": (4,)} | _LATENT,
    "mla_value": _HEADS | _LATENT | {"v_head_dim": (64, 128)},
    "moe_front": {"num_experts": (896, 128), "hidden_size": (256, 7168), "routed_expert_hidden_size": (3584, 160)},
    "route": {"num_experts": (896, 384)},
    "experts": {
        "experts_held": (40, 20),
        "moe_intermediate_size": (96, 32),
        "routed_expert_hidden_size": (96, 3584),
    },
    "shared_expert": {"shared_intermediate_size": (384, 96), "hidden_size": (256, 7168)},
    "moe_tail": _RANKS | {"hidden_size": (256, 7168, 256), "routed_expert_hidden_size": (96, 96, 3584)},
}
"""Levels of every op that has rows: heads of one of 8 and one of 16 ranks of K3, of all of them over a sharded context,
ranks and blocks of any number, pages of 16 and 64, and every true width beside a small one."""

WIDTHS = ("hidden_size", "kv_lora_rank", "routed_expert_hidden_size", "page_size")
"""Levels that a case has SMALL's of where its true ones cost too much."""

WIDE_UP_TO: Mapping[str, int] = MappingProxyType(
    {
        "all_reduce": 128,
        "moe_tail": 128,
        "attn_res": 16,
        "output_mix": 2,
        "mla_attend": 2,
        "mla_attend_dcp": 2,
        "experts": 1,
    }
)
"""Where true widths cost too much: rows (times ranks, of sums over ranks; ranks alone, where their weights cost)."""

ALL_EXPERTS_AT = 8
"""Rows at which an `experts` case has as many experts as K3, of one block each: a hundred of them are chosen."""

MOST, FEW = 5, 3
"""Cases of an op at one bin, at most; few of `output_mix`, which is costly and varies in three ways."""


def cases(op: str) -> int:
    """Cases of an op at one batch bin: as many as its longest list of levels has, at most five."""
    # Seven verify widths at every bin would cost as much as all other ops together.
    longest = max(len(levels) for name, levels in LEVELS[op].items() if name != "verify_width")
    return min(longest, FEW if op == "output_mix" else MOST)


def shape(op: str, turn: int, rows: int = 1) -> dict[str, int]:
    """The levels of an op whose turn it is, by name of the dimension, as a case of so many rows has them."""
    levels = {name: levels[turn % len(levels)] for name, levels in LEVELS[op].items()}
    if _cost(op, levels, rows) > WIDE_UP_TO.get(op, rows):
        levels |= {name: min(levels[name], SMALL[name]) for name in WIDTHS if name in levels}
    if op == "experts" and rows == ALL_EXPERTS_AT and levels["experts_held"] == max(LEVELS[op]["experts_held"]):
        one_block = {"moe_intermediate_size": MXFP4_BLOCK, "routed_expert_hidden_size": MXFP4_BLOCK}
        levels |= {"experts_held": K3_SHARD_8["num_experts"], **one_block}
    return levels


def _cost(op: str, levels: Dims, rows: int) -> int:
    """What a true width is multiplied by."""
    if op == "output_mix":
        return levels["ranks"]
    return rows * levels["ranks"] if op in ("all_reduce", "moe_tail") else rows
