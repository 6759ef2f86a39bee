"""Dimensions and constants of a K3-family text model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_impl.config_fields import ConfigError, unsupported_fields

O_NORM_EPS = 1e-5
"""Epsilon of KDA's gated output norm: a constant upstream, whatever `rms_norm_eps` says."""

L2_NORM_EPS = 1e-6
"""Epsilon under the root of KDA's q and k normalisation."""

ROUTER_SUM_EPS = 1e-20
"""Added to the sum of the selected router scores before the weights are divided by it."""


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
        problems = unsupported_fields(fields)
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
