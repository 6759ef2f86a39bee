"""Dimensions and constants of a K3-family text model, read from a Hugging Face `config.json` or a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

O_NORM_EPS = 1e-5
"""Epsilon of KDA's gated output norm: a constant upstream, whatever `rms_norm_eps` says."""

L2_NORM_EPS = 1e-6
"""Epsilon under the root of KDA's q and k normalisation."""

ROUTER_SUM_EPS = 1e-20
"""Added to the sum of the selected router scores before the weights are divided by it."""


class ConfigError(ValueError):
    """A model configuration that this project cannot run; the message lists every reason."""


@dataclass(frozen=True)
class ModelConfig:
    """One K3-family text model. Layer indices are 0-based; all sizes are whole-model sizes, not a rank's share."""

    name: str
    vocab_size: int
    hidden_size: int
    full_attention_layers: tuple[int, ...]
    num_hidden_layers: int
    kda_heads: int
    kda_head_dim: int
    gate_lower_bound: float
    mla_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    latent_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    attn_res_block_size: int
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    first_dense_layers: int = 1
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    conv_kernel: int = 4
    max_position_embeddings: int = 4096
    bos_token_id: int = 256
    eos_token_id: int = 257
    pad_token_id: int = 258

    def is_mla(self, layer: int) -> bool:
        """True where `layer` (0-based) is full attention, False where it is KDA."""
        return layer in self.full_attention_layers

    def is_dense(self, layer: int) -> bool:
        """True where `layer` has the dense MLP instead of the latent MoE."""
        return layer < self.first_dense_layers

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers, in order."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_mla(i))

    @property
    def kda_size(self) -> int:
        """Width of q, k, v and g of one KDA layer: heads x head size."""
        return self.kda_heads * self.kda_head_dim

    @property
    def latent_row(self) -> int:
        """Elements of one latent-cache row: `kv_lora_rank + qk_rope_head_dim` (576 at true size)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mla_scale(self) -> float:
        """Softmax scale of MLA: the unabsorbed query width to the power of -1/2."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert: all shared experts side by side."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def residual_blocks(self) -> int:
        """Rows of the AttnRes block bank: one per started block of `attn_res_block_size` layers."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any], name: str) -> ModelConfig:
        """Read the fields of a `KimiLinearForCausalLM` config (K3 form: `use_full_rank_gate`).

        Raises:
            ConfigError: a field is missing or has a value that the K3 form does not have; every one is listed.
        """
        problems = _unsupported_fields(fields)
        if problems:
            raise ConfigError(f"{name}: " + "; ".join(problems))
        linear = fields["linear_attn_config"]
        return cls(
            name=name,
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            full_attention_layers=tuple(i - 1 for i in linear["full_attn_layers"]),
            kda_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            conv_kernel=linear["short_conv_kernel_size"],
            gate_lower_bound=float(linear["gate_lower_bound"]),
            mla_heads=fields["num_attention_heads"],
            q_lora_rank=fields["q_lora_rank"],
            kv_lora_rank=fields["kv_lora_rank"],
            qk_nope_head_dim=fields["qk_nope_head_dim"],
            qk_rope_head_dim=fields["qk_rope_head_dim"],
            v_head_dim=fields["v_head_dim"],
            intermediate_size=fields["intermediate_size"],
            num_experts=fields["num_experts"],
            experts_per_token=fields["num_experts_per_token"],
            latent_size=fields["routed_expert_hidden_size"],
            moe_intermediate_size=fields["moe_intermediate_size"],
            num_shared_experts=fields["num_shared_experts"],
            attn_res_block_size=fields["attn_res_block_size"],
            situ_beta=float(fields["activation_situ_beta"]),
            situ_linear_beta=float(fields["activation_situ_linear_beta"]),
            first_dense_layers=fields["first_k_dense_replace"],
            routed_scaling_factor=float(fields["routed_scaling_factor"]),
            rms_norm_eps=float(fields["rms_norm_eps"]),
            max_position_embeddings=fields["max_position_embeddings"],
            bos_token_id=fields["bos_token_id"],
            eos_token_id=fields["eos_token_id"],
            pad_token_id=fields["pad_token_id"],
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` fields of this model, with upstream's names and 1-based layer lists."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "head_dim": self.kda_head_dim,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.mla_heads,
            "num_key_value_heads": self.mla_heads,
            "hidden_act": "situ",
            "activation_situ_beta": self.situ_beta,
            "activation_situ_linear_beta": self.situ_linear_beta,
            "rms_norm_eps": self.rms_norm_eps,
            "attn_res_block_size": self.attn_res_block_size,
            "latent_moe_use_norm": True,
            "routed_expert_hidden_size": self.latent_size,
            "mla_use_output_gate": True,
            "mla_use_nope": True,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_experts": self.num_experts,
            "num_experts_per_token": self.experts_per_token,
            "num_shared_experts": self.num_shared_experts,
            "routed_scaling_factor": self.routed_scaling_factor,
            "first_k_dense_replace": self.first_dense_layers,
            "moe_layer_freq": 1,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": self.max_position_embeddings,
            "model_max_length": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "linear_attn_config": {
                "kda_layers": [i + 1 for i in self.kda_layers],
                "full_attn_layers": [i + 1 for i in self.full_attention_layers],
                "num_heads": self.kda_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.conv_kernel,
                "use_full_rank_gate": True,
                "gate_lower_bound": self.gate_lower_bound,
            },
        }


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


def _unsupported_fields(fields: Mapping[str, Any]) -> list[str]:
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


def read_config(path: Path) -> ModelConfig:
    """Read `config.json` of the checkpoint folder `path`.

    Raises:
        ConfigError: the file is missing, is not JSON, or describes an unsupported model.
    """
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: not found; a checkpoint folder holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except RecursionError:
        raise ConfigError(f"{file}: not valid JSON for a model: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not valid JSON, line {error.lineno}: {error.msg}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: holds {type(fields).__name__}, a JSON object is needed")
    return ModelConfig.from_hf(fields, name=path.name)
