"""Checkpoints: a Hugging Face folder with upstream's parameter names, safetensors only, checked whole before use."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_impl.config import ModelConfig, read_config
from decode_impl.config_fields import ConfigError
from numerics.formats import E8M0_NAN

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_LISTED_PROBLEMS = 4

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one stored tensor."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file or tensor and what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as stored: its configuration, its tensors by upstream name, and a digest of the files."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    digest: str


def expected_tensors(config: ModelConfig) -> dict[str, Spec]:
    """Shape and dtype of every tensor of a K3-family checkpoint, by upstream name."""
    bf16, f32 = torch.bfloat16, torch.float32
    hidden = config.hidden_size
    specs: dict[str, Spec] = {
        "model.embed_tokens.weight": ((config.vocab_size, hidden), bf16),
        "lm_head.weight": ((config.vocab_size, hidden), bf16),
        "model.norm.weight": ((hidden,), bf16),
        "model.output_attn_res_norm.weight": ((hidden,), bf16),
        "model.output_attn_res_proj.weight": ((1, hidden), bf16),
    }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        ):
            specs[f"{layer}{name}.weight"] = ((hidden,), bf16)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            specs[f"{layer}{name}.weight"] = ((1, hidden), bf16)
        attention = _mla_specs(config) if config.is_mla(i) else _kda_specs(config, f32)
        specs |= {f"{layer}self_attn.{name}": spec for name, spec in attention.items()}
        if config.is_dense(i):
            specs |= _mlp_specs(f"{layer}mlp.", hidden, config.intermediate_size)
        else:
            specs |= {f"{layer}block_sparse_moe.{name}": spec for name, spec in _moe_specs(config).items()}
    return specs


def _kda_specs(config: ModelConfig, f32: torch.dtype) -> dict[str, Spec]:
    bf16, hidden, size = torch.bfloat16, config.hidden_size, config.kda_size
    specs: dict[str, Spec] = {f"{x}_proj.weight": ((size, hidden), bf16) for x in "qkvg"}
    specs |= {f"{x}_conv1d.weight": ((size, 1, config.conv_kernel), bf16) for x in "qkv"}
    return specs | {
        "b_proj.weight": ((config.kda_heads, hidden), bf16),
        "f_a_proj.weight": ((config.kda_head_dim, hidden), bf16),
        "f_b_proj.weight": ((size, config.kda_head_dim), bf16),
        "A_log": ((1, 1, config.kda_heads, 1), f32),
        "dt_bias": ((size,), f32),
        "o_norm.weight": ((config.kda_head_dim,), bf16),
        "o_proj.weight": ((hidden, size), bf16),
    }


def _mla_specs(config: ModelConfig) -> dict[str, Spec]:
    bf16, hidden, heads = torch.bfloat16, config.hidden_size, config.mla_heads
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "q_a_proj.weight": ((config.q_lora_rank, hidden), bf16),
        "q_a_layernorm.weight": ((config.q_lora_rank,), bf16),
        "q_b_proj.weight": ((heads * query, config.q_lora_rank), bf16),
        "kv_a_proj_with_mqa.weight": ((config.latent_row, hidden), bf16),
        "kv_a_layernorm.weight": ((config.kv_lora_rank,), bf16),
        "kv_b_proj.weight": (
            (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
            bf16,
        ),
        "g_proj.weight": ((heads * config.v_head_dim, hidden), bf16),
        "o_proj.weight": ((hidden, heads * config.v_head_dim), bf16),
    }


def _mlp_specs(prefix: str, hidden: int, width: int) -> dict[str, Spec]:
    return {
        f"{prefix}gate_proj.weight": ((width, hidden), torch.bfloat16),
        f"{prefix}up_proj.weight": ((width, hidden), torch.bfloat16),
        f"{prefix}down_proj.weight": ((hidden, width), torch.bfloat16),
    }


def _moe_specs(config: ModelConfig) -> dict[str, Spec]:
    bf16, hidden, latent, width = (
        torch.bfloat16,
        config.hidden_size,
        config.latent_size,
        config.moe_intermediate_size,
    )
    specs: dict[str, Spec] = {
        "gate.weight": ((config.num_experts, hidden), bf16),
        "gate.e_score_correction_bias": ((config.num_experts,), torch.float32),
        "routed_expert_down_proj.weight": ((latent, hidden), bf16),
        "routed_expert_up_proj.weight": ((hidden, latent), bf16),
        "routed_expert_norm.weight": ((latent,), bf16),
    }
    specs |= _mlp_specs("shared_experts.", hidden, config.shared_intermediate_size)
    for expert in range(config.num_experts):
        for matrix, (rows, columns) in {
            "w1": (width, latent),
            "w3": (width, latent),
            "w2": (latent, width),
        }.items():
            stem = f"experts.{expert}.{matrix}.weight"
            specs[f"{stem}_packed"] = ((rows, columns // 2), torch.uint8)
            specs[f"{stem}_scale"] = ((rows, columns // 32), torch.uint8)
    return specs


def fp8_scale_names(layer: int) -> tuple[str, str]:
    """Names of the FP8 scales (key, query) of an MLA layer: optional f32 scalars, needed by an FP8 cache only."""
    stem = f"model.layers.{layer}.self_attn"
    return f"{stem}.k_scale", f"{stem}.q_scale"


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a checkpoint folder: `config.json` and one or more `*.safetensors` files.

    Raises:
        CheckpointError: the folder or a file is missing, truncated or unsupported, or tensors are missing, unknown,
            of a wrong shape or dtype, or not finite; the message lists the first few and their number.
    """
    try:
        config = read_config(folder)
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {error}") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"checkpoint {folder}: no *.safetensors file in it")
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256(json.dumps(config.to_hf(), sort_keys=True).encode())
    for file in files:
        tensors |= _read_tensors(file, tensors)
        digest.update(file.read_bytes())
    problems = _problems(config, tensors)
    if problems:
        listed = "; ".join(problems[:_LISTED_PROBLEMS])
        rest = f"; and {len(problems) - _LISTED_PROBLEMS} more" if len(problems) > _LISTED_PROBLEMS else ""
        raise CheckpointError(f"checkpoint {folder}: {listed}{rest}")
    return Checkpoint(config, tensors, digest.hexdigest())


def _read_tensors(file: Path, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {file}: not a whole safetensors file ({error})") from None
    twice = sorted(tensors.keys() & known.keys())
    if twice:
        raise CheckpointError(f"checkpoint {file}: tensor {twice[0]} is in another file of the folder too")
    return tensors


def _problems(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    specs = expected_tensors(config)
    for layer in config.full_attention_layers:
        specs |= {name: ((), torch.float32) for name in fp8_scale_names(layer) if name in tensors}
    problems = [f"tensor {name} is missing" for name in specs if name not in tensors]
    problems += [f"tensor {name} is unknown" for name in sorted(tensors.keys() - specs.keys())]
    for name in specs.keys() & tensors.keys():
        (shape, dtype), tensor = specs[name], tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            given, wanted = f"{tensor.dtype} {tuple(tensor.shape)}", f"{dtype} {shape}"
            problems.append(f"tensor {name} is {given}, {wanted} is needed".replace("torch.", ""))
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"tensor {name} holds NaN or infinity")
        elif name.endswith(".weight_scale") and bool((tensor == E8M0_NAN).any()):
            problems.append(f"tensor {name} holds NaN (E8M0 code {E8M0_NAN:#x})")
    return sorted(problems)


def save_checkpoint(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`, after checking every tensor.

    Cut short at any moment, a save leaves the old checkpoint whole. Only where it replaces another configuration is
    there an instant, between two renames, that leaves a folder without `config.json`; a mix is never left.

    Raises:
        CheckpointError: the tensors are not those of `config`.
    """
    problems = _problems(config, tensors)
    if problems:
        raise CheckpointError(f"checkpoint {folder} not written: {problems[0]} ({len(problems)} problem(s) in all)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as staging:
        weights, fields = Path(staging) / WEIGHTS_FILE, Path(staging) / CONFIG_FILE
        save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, weights, metadata={"format": "pt"})
        text = json.dumps(config.to_hf(), indent=2) + "\n"
        fields.write_text(text, encoding="utf-8")
        old = folder / CONFIG_FILE
        if old.exists() and old.read_text(encoding="utf-8", errors="replace") != text:
            old.unlink()
        os.replace(weights, folder / WEIGHTS_FILE)
        os.replace(fields, folder / CONFIG_FILE)
