"""Configurations by name: the true model, one rank's share of it, and the embedded small one."""

from __future__ import annotations

from dataclasses import replace

from decode_impl.config import ModelConfig
from decode_impl.config_fields import ConfigError

K3 = ModelConfig(
    name="k3",
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    full_attention_layers=(*range(3, 92, 4), 92),
    kda_heads=96,
    kda_head_dim=128,
    gate_lower_bound=-5.0,
    mla_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=33792,
    num_experts=896,
    experts_per_token=16,
    latent_size=3584,
    moe_intermediate_size=3072,
    num_shared_experts=2,
    attn_res_block_size=12,
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)
"""The true sizes of Kimi K3's text backbone."""

K3_MINI = ModelConfig(
    name="k3-mini",
    vocab_size=320,
    hidden_size=192,
    num_hidden_layers=8,
    full_attention_layers=(3, 7),
    kda_heads=4,
    kda_head_dim=128,
    gate_lower_bound=-5.0,
    mla_heads=4,
    q_lora_rank=96,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=256,
    num_experts=16,
    experts_per_token=4,
    latent_size=96,
    moe_intermediate_size=64,
    num_shared_experts=1,
    attn_res_block_size=3,
    max_position_embeddings=8192,
)
"""The embedded model: K3's architecture at a size that ships inside the package."""


_SHARDS = (1, 2, 4, 8, 16, 32)


def k3_shard(tp: int) -> ModelConfig:
    """One rank's share of the true sizes at tensor parallelism `tp`, for kernels and benchmarks on one device.

    Heads and expert widths are divided; the hidden size, the latent and the experts' number are whole on every rank.

    Raises:
        ConfigError: `tp` does not divide heads and vocabulary, or an MXFP4 block would be split.
    """
    if tp not in _SHARDS:
        raise ConfigError(f"k3_shard: tp is {tp}, allowed are {_SHARDS} (96 heads, vocabulary, MXFP4 blocks of 32)")
    return replace(
        K3,
        name=f"k3_shard({tp})",
        kda_heads=K3.kda_heads // tp,
        mla_heads=K3.mla_heads // tp,
        intermediate_size=K3.intermediate_size // tp,
        moe_intermediate_size=K3.moe_intermediate_size // tp,
        vocab_size=K3.vocab_size // tp,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def preset(name: str) -> ModelConfig:
    """A configuration by name: `k3`, `k3-mini` or `k3_shard(N)`.

    Raises:
        ConfigError: the name is none of these.
    """
    if name in ("k3", "k3-mini"):
        return K3 if name == "k3" else K3_MINI
    if name.startswith("k3_shard(") and name.endswith(")") and name[9:-1].isdecimal():
        return k3_shard(int(name[9:-1]))
    raise ConfigError(f"model preset {name!r} is unknown; allowed are k3, k3-mini and k3_shard(N)")
