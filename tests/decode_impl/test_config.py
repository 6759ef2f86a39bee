"""Configurations: the published sizes, what is refused and why, and the way to config.json and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_impl.config import ModelConfig, read_config
from decode_impl.config_fields import ConfigError
from decode_impl.presets import K3, K3_MINI, k3_shard, preset


def test_k3_has_the_published_sizes() -> None:
    assert (K3.num_hidden_layers, len(K3.kda_layers), len(K3.full_attention_layers)) == (93, 69, 24)
    assert [i + 1 for i in K3.full_attention_layers] == [*range(4, 93, 4), 93]
    assert (K3.hidden_size, K3.vocab_size) == (7168, 163840)
    assert (K3.kda_heads, K3.kda_head_dim, K3.conv_kernel, K3.gate_lower_bound) == (96, 128, 4, -5.0)
    assert (K3.mla_heads, K3.q_lora_rank, K3.kv_lora_rank) == (96, 1536, 512)
    assert (K3.qk_nope_head_dim, K3.qk_rope_head_dim, K3.v_head_dim) == (128, 64, 128)
    assert (K3.latent_row, K3.mla_scale) == (576, 192**-0.5)
    assert (K3.num_experts, K3.experts_per_token, K3.routed_scaling_factor) == (896, 16, 1.0)
    assert (K3.latent_size, K3.moe_intermediate_size, K3.shared_intermediate_size) == (3584, 3072, 6144)
    assert (K3.intermediate_size, K3.first_dense_layers) == (33792, 1)
    assert (K3.attn_res_block_size, K3.residual_blocks) == (12, 8)
    assert (K3.situ_beta, K3.situ_linear_beta, K3.rms_norm_eps) == (4.0, 25.0, 1e-5)
    assert K3.max_position_embeddings == 2**20
    assert (K3.bos_token_id, K3.eos_token_id, K3.pad_token_id) == (163584, 163586, 163839)


def test_layers_that_start_a_residual_block_are_kda_and_only_the_first_mlp_is_dense() -> None:
    assert not any(K3.is_mla(i) for i in range(0, 93, 12))
    assert [i for i in range(93) if K3.is_dense(i)] == [0]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_a_shard_is_one_ranks_share_of_heads_widths_and_vocabulary(tp: int) -> None:
    shard = k3_shard(tp)
    for name in ("kda_heads", "mla_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        assert getattr(shard, name) * tp == getattr(K3, name)
    for name in ("hidden_size", "latent_size", "num_experts", "q_lora_rank", "kv_lora_rank", "full_attention_layers"):
        assert getattr(shard, name) == getattr(K3, name)
    assert shard.moe_intermediate_size % 32 == 0
    assert preset(f"k3_shard({tp})") == shard
    assert ModelConfig.from_hf(shard.to_hf(), shard.name) == shard


@pytest.mark.parametrize("tp", [-1, 0, 3, 5, 6, 12, 24, 48, 64, 96, 128])
def test_a_shard_that_cannot_be_cut_evenly_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match=rf"k3_shard: tp is {tp}, allowed are \(1, 2, 4, 8, 16, 32\)"):
        k3_shard(tp)


def test_presets_have_names() -> None:
    assert preset("k3") is K3
    assert preset("k3-mini") is K3_MINI


@pytest.mark.parametrize("name", ["", "k4", "k3_shard", "k3_shard()", "k3_shard(-1)", "k3_shard(two)", "k3_shard(²)"])
def test_an_unknown_preset_is_refused_with_the_ones_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; allowed are k3, k3-mini and k3_shard\(N\)$"):
        preset(name)


@pytest.mark.parametrize("config", [K3, K3_MINI, replace(K3_MINI, situ_beta=3.5, first_dense_layers=2, conv_kernel=3)])
def test_a_config_survives_the_way_to_json_and_back(config: ModelConfig) -> None:
    fields = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(fields, config.name) == config


def fields_with(**changes: Any) -> dict[str, Any]:
    fields = K3_MINI.to_hf()
    linear = fields["linear_attn_config"]
    for name, value in changes.items():
        (linear if name in linear else fields)[name] = value
    return fields


REFUSED = {
    "hidden_act": "silu",
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "latent_moe_use_norm": False,
    "moe_router_activation_func": "softmax",
    "moe_renormalize": False,
    "num_expert_group": 8,
    "topk_group": 4,
    "moe_layer_freq": 2,
    "tie_word_embeddings": True,
    "use_full_rank_gate": False,
    "hidden_size": 0,
    "vocab_size": "320",
    "num_experts": True,
    "head_dim": -128,
    "rms_norm_eps": None,
    "activation_situ_beta": math.nan,
    "activation_situ_linear_beta": 0,
    "routed_scaling_factor": math.inf,
    "bos_token_id": -1,
    "first_k_dense_replace": 0.5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_the_k3_form_does_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^m: (linear_attn_config\.)?{name} is [^;]*$"):
        ModelConfig.from_hf(fields_with(**{name: REFUSED[name]}), "m")


def test_every_unsupported_field_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(fields_with(**REFUSED), "m")
    message = str(refusal.value)
    assert message.count(";") == len(REFUSED) - 1
    assert all(f"{name} is " in message for name in REFUSED)
    assert "\n" not in message


def test_a_missing_field_is_listed_too() -> None:
    fields = K3_MINI.to_hf()
    del fields["q_lora_rank"], fields["linear_attn_config"]
    with pytest.raises(ConfigError, match=r"q_lora_rank is None.*linear_attn_config\.num_heads is None"):
        ModelConfig.from_hf(fields, "m")


def test_fields_that_contradict_each_other_are_listed_at_once() -> None:
    fields = fields_with(
        kda_layers=[1, 2, 3],
        gate_lower_bound=-5.5,
        num_experts_per_token=17,
        routed_expert_hidden_size=100,
        moe_intermediate_size=48,
        pad_token_id=320,
    )
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(fields, "m")
    for reason in (
        "must split the layers 1..8",
        "gate_lower_bound is -5.5",
        "num_experts_per_token is 17",
        "routed_expert_hidden_size is 100",
        "moe_intermediate_size is 48",
        "pad_token_id is 320",
    ):
        assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "kda_layers", [None, "123567", [1, 2, 3, 5, 6, "7"], [1, 2, 3, 5, 6, 7, 7], [0, 1, 2, 3, 5, 6]]
)
def test_layer_lists_that_do_not_split_the_layers_are_refused(kda_layers: object) -> None:
    with pytest.raises(ConfigError, match=r"must split the layers 1\.\.8 between them$"):
        ModelConfig.from_hf(fields_with(kda_layers=kda_layers), "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not found"),
        (b'{\n "a": 1,\n "b" 2\n}', "not valid JSON, line 3"),
        (b"", "not valid JSON, line 1"),
        (b"[1, 2]", "holds list, a JSON object is needed"),
        (b'{"a": "\xff"}', "cannot be read"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_config(tmp_path)
    assert "\n" not in str(refusal.value)
    assert "config.json" in str(refusal.value)
