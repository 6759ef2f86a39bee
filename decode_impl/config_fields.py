"""What the fields of a `config.json` must be for a model of the K3 form; every one that is not is listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A model configuration that this project cannot run; the message lists every reason."""


_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "linear_attn_config.use_full_rank_gate": True,
}

_POSITIVE_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "routed_expert_hidden_size",
    "moe_intermediate_size",
    "num_shared_experts",
    "attn_res_block_size",
    "max_position_embeddings",
    "linear_attn_config.num_heads",
    "linear_attn_config.head_dim",
    "linear_attn_config.short_conv_kernel_size",
)

_LARGEST = 2**24
"""No size or constant of such a model is larger; beyond it a typing error would only exhaust the memory."""

_MOST = {"num_hidden_layers": 4096, "num_experts": 65536}

_POSITIVE_NUMBERS = ("activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor", "rms_norm_eps")

_NUMBERS = (*_POSITIVE_NUMBERS, "linear_attn_config.gate_lower_bound")

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _lookup(fields: Mapping[str, Any], path: str) -> Any:
    value: Any = fields
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value) if not _is_integer(value) or abs(value) <= _LARGEST**2 else "a huge integer"
    return text if len(text) <= 80 else f"{text[:77]}..."


def unsupported_fields(fields: Mapping[str, Any]) -> list[str]:
    """Every reason why this is no model of the K3 form; contradictions once every field is there."""
    problems = []
    for path, wanted in _REQUIRED_VALUES.items():
        value = _lookup(fields, path)
        if value != wanted:
            problems.append(f"{path} is {value!r}, only {wanted!r} is supported")
    for path in _POSITIVE_INTEGERS:
        value, most = _lookup(fields, path), _MOST.get(path, _LARGEST)
        if not _is_integer(value) or not 1 <= value <= most:
            problems.append(f"{path} is {_shown(value)}, an integer from 1 to {most} is needed")
    for path in _NUMBERS:
        value = _lookup(fields, path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            problems.append(f"{path} is {_shown(value)}, a finite number of at most {_LARGEST} is needed")
        elif path in _POSITIVE_NUMBERS and value <= 0:
            problems.append(f"{path} is {value!r}, a positive number is needed")
    for path in (*_TOKEN_IDS, "first_k_dense_replace"):
        value = _lookup(fields, path)
        if not _is_integer(value) or not 0 <= value <= _LARGEST:
            problems.append(f"{path} is {_shown(value)}, an integer from 0 to {_LARGEST} is needed")
    return problems or _inconsistent_fields(fields)


def _inconsistent_fields(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    linear, layers = fields["linear_attn_config"], fields["num_hidden_layers"]
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    listed = [*kda, *full] if isinstance(kda, list) and isinstance(full, list) else []
    if not all(map(_is_integer, listed)) or sorted(listed) != list(range(1, layers + 1)):
        problems.append(f"kda_layers and full_attn_layers must split the layers 1..{layers} between them")
    if not -5.0 <= linear["gate_lower_bound"] < 0:
        problems.append(f"gate_lower_bound is {linear['gate_lower_bound']}, allowed is -5 <= bound < 0")
    if fields["num_experts_per_token"] > fields["num_experts"]:
        problems.append(f"num_experts_per_token is {fields['num_experts_per_token']}, more than num_experts")
    problems += [
        f"{name} is {fields[name]}, a multiple of 32 is needed (MXFP4 blocks)"
        for name in ("routed_expert_hidden_size", "moe_intermediate_size")
        if fields[name] % 32
    ]
    problems += [f"{n} is {fields[n]}, outside the vocabulary" for n in _TOKEN_IDS if fields[n] >= fields["vocab_size"]]
    return problems
