"""Shapes that an op's cases take in turn: every number of heads, ranks, blocks and experts at every batch bin.

A kernel is chosen by its shape as well as by its batch bin, and each choice can be wrong alone. `cases(op)` cases a bin
go through the levels of that op, the next bin goes on where the last one stopped, and the next seed starts one further.
"""

from __future__ import annotations

from types import MappingProxyType

from numerics.families.dims import NARROW_8, Dims

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

LEVELS: dict[str, Levels] = {
    "projection": {"projection_size": (192, 328), "hidden_size": (256, 7168)},
    "rms_norm": {"hidden_size": (256, 448)},
    "all_reduce": _RANKS,
    "attn_res": _BLOCKS,
    "output_mix": _RANKS | _BLOCKS | _HEADS,
    "kda_step": _KDA_HEADS,
    "kda_verify": _KDA_HEADS | {"verify_width": (8, 3, 5, 2, 7, 4, 6)},
    "mla_query": _HEADS,
    "mla_attend": _HEADS,
    "mla_attend_dcp": {"ranks": (8, 2), "num_attention_heads": (96, 12), "page_size": (4,)},
    "mla_value": _HEADS,
    "moe_front": {"routed_expert_hidden_size": (96, 160)},
    "route": {"num_experts": (896, 384)},
    "experts": {"experts_held": (40, 20), "moe_intermediate_size": (32, 96)},
    "shared_expert": {"shared_intermediate_size": (384, 96)},
    "moe_tail": _RANKS,
}
"""Levels of every op that has rows: heads of one of 8 and one of 16 ranks of K3, of all of them over a sharded context,
ranks and blocks of any number, and a projection's true input width."""

MOST, FEW = 5, 3
"""Cases of an op at one bin, at most; few of `output_mix`, which is costly and varies in three ways."""


def cases(op: str) -> int:
    """Cases of an op at one batch bin: as many as its longest list of levels has, at most five."""
    # Seven verify widths at every bin would cost as much as all other ops together.
    longest = max(len(levels) for name, levels in LEVELS[op].items() if name != "verify_width")
    return min(longest, FEW if op == "output_mix" else MOST)


def shape(op: str, turn: int) -> dict[str, int]:
    """The levels of an op whose turn it is, by name of the dimension."""
    return {name: levels[turn % len(levels)] for name, levels in LEVELS[op].items()}
