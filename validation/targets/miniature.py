"""A model of next to no size with all mechanisms of the family, so that an engine can run thousands of steps a minute.

Weights are random: its text means nothing. What an engine does with slots, pages, chunks, drafts and prefixes does not
depend on the model.
"""

from __future__ import annotations

from dataclasses import replace

from decode_impl.checkpoint import Checkpoint
from decode_impl.presets import K3_MINI
from decode_impl.random_weights import random_checkpoint

MINIATURE = replace(
    K3_MINI,
    name="miniature",
    vocab_size=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    hidden_size=32,
    num_hidden_layers=3,
    full_attention_layers=(1,),
    attn_res_block_size=2,
    kda_heads=2,
    mla_heads=2,
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    intermediate_size=32,
    num_experts=2,
    experts_per_token=2,
    latent_size=32,
    moe_intermediate_size=64,
)
"""Two KDA layers, since some faults mix layers up, around one MLA layer; two heads, so that a second rank
has some. Every token takes both experts: where experts were chosen, a near tie between two of them would be a
difference of any size that no rounding explains."""

_SEED = 5


def miniature() -> Checkpoint:
    """The miniature's checkpoint, the same every time."""
    return random_checkpoint(MINIATURE, _SEED)
