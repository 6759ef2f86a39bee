"""Dimensions of one rank's share of a model, by Hugging Face config names where those exist.

Names of our own: `kda_num_heads` and `kda_head_dim` (`linear_attn_config.num_heads` and `.head_dim`),
`shared_intermediate_size` (shared expert width of this rank), `attn_res_blocks` (residual blocks allocated),
`blocks_used` (those in use; one less than allocated where it is missing), `ranks` (partials an all-reduce sums),
`page_size` (tokens per cache page), `projection_size` (rows of a plain projection), `verify_width` (tokens of a request
in a verify step) and `experts_held` (experts whose weights an `experts` case makes; its ids stay below). Head counts
and `moe_intermediate_size` are this rank's share; everything else is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Dims = Mapping[str, int]

MINI: Dims = MappingProxyType(
    {
        "hidden_size": 192,
        "kda_num_heads": 4,
        "kda_head_dim": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "experts_held": 16,
        "routed_expert_hidden_size": 128,
        "moe_intermediate_size": 64,
        "shared_intermediate_size": 128,
        "attn_res_blocks": 3,
        "ranks": 2,
        "page_size": 16,
        "projection_size": 320,
        "verify_width": 4,
    }
)
"""A small model with K3's head size and every mechanism: one case takes milliseconds."""

K3_SHARD_8: Dims = MappingProxyType(
    {
        "hidden_size": 7168,
        "kda_num_heads": 12,
        "kda_head_dim": 128,
        "num_attention_heads": 12,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "experts_held": 20,
        "routed_expert_hidden_size": 3584,
        "moe_intermediate_size": 384,
        "shared_intermediate_size": 768,
        "attn_res_blocks": 8,
        "ranks": 8,
        "page_size": 64,
        "projection_size": 3648,
        "verify_width": 8,
    }
)
"""One of 8 ranks of K3 at true widths. Only `experts_held` is reduced (20 of 896): all of them take 1.3
GB."""

K3_SHARD_16: Dims = MappingProxyType(
    {
        **K3_SHARD_8,
        "kda_num_heads": 6,
        "num_attention_heads": 6,
        "moe_intermediate_size": 192,
        "shared_intermediate_size": 384,
        "ranks": 16,
        "projection_size": 2880,
    }
)
"""One of 16 ranks of K3, as `K3_SHARD_8`."""

NARROW_8: Dims = MappingProxyType(
    {
        **K3_SHARD_8,
        "hidden_size": 256,
        "kda_head_dim": 32,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "experts_held": 20,
        "routed_expert_hidden_size": 160,
        "moe_intermediate_size": 96,
        "shared_intermediate_size": 96,
        "projection_size": 192,
        "page_size": 16,
    }
)
"""Heads, ranks, experts and blocks of one of 8 ranks of K3 at a small width that is no multiple of 128."""

NARROW_16: Dims = MappingProxyType({**NARROW_8, "kda_num_heads": 6, "num_attention_heads": 6, "ranks": 16})
"""One of 16 ranks, as `NARROW_8`."""
