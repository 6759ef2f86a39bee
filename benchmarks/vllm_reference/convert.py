"""Mechanical variants of a checkpoint, for parts of vLLM 0.33 whose kernels are fixed to the released K3's sizes.

Neither changes what the model computes:
- `experts`: MXFP4 experts as the BF16 numbers they stand for (exact: four significant bits times a power of two);
- `mla`: MLA with 128 non-rotated query dims and a latent of 512, the added rows and columns zero. The latent's RMS is
  then over 512 numbers, 384 of them zero, instead of 128: its projection is doubled and its norm weight halved (both
  exact), which gives the same mean square. The softmax scale follows the query's width and must be set back
  (`softmax_scale`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from numerics.formats import mxfp4_dequantise

NOPE, LATENT = 128, 512
"""The released K3's non-rotated query width and latent width."""

COPIED = ("tokenizer.json", "tokenizer_config.json")


def convert(source: Path, folder: Path, *, experts: bool, mla: bool) -> None:
    """Write the variant of `source` into `folder`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    if experts:
        tensors = dense_experts(tensors)
        config.pop("quantization_config", None)
    if mla:
        tensors, config = wide_mla(tensors, config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def softmax_scale(config: Mapping[str, Any]) -> float:
    """The attention scale of the shipped model."""
    return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5)


def dense_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every `X.weight_packed` and `X.weight_scale` as the BF16 tensor `X.weight`."""
    dense = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            exact = mxfp4_dequantise(tensor, tensors[f"{stem}_scale"], torch.float32)
            dense[stem] = exact.to(torch.bfloat16)
            if not torch.equal(dense[stem].float(), exact):
                raise ValueError(f"tensor {stem}: not exact in BF16; its scales leave BF16's range")
        elif not name.endswith(".weight_scale"):
            dense[name] = tensor
    return dense


def wide_mla(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """MLA tensors at the released K3's sizes, and the configuration that says so.

    Raises:
        ValueError: a size that is larger than the released one, or a latent whose ratio to it is no power of four.
    """
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    latent, heads = config["kv_lora_rank"], config["num_attention_heads"]
    ratio = math.isqrt(LATENT // latent)
    if nope > NOPE or latent * ratio * ratio != LATENT or ratio & (ratio - 1):
        raise ValueError(
            f"nope {nope} and latent {latent}: at most {NOPE}, and {LATENT} over a power of four, are needed"
        )
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "q_b_proj.weight": lambda w: _pad_heads(w, heads, nope, NOPE),
        "kv_a_proj_with_mqa.weight": lambda w: torch.cat([_rows(w[:latent] * ratio, LATENT), w[latent:]]),
        "kv_a_layernorm.weight": lambda w: _rows(w / ratio, LATENT),
        "kv_b_proj.weight": lambda w: _rows(_pad_heads(w, heads, nope, NOPE).T, LATENT).T,
    }
    layers = [index - 1 for index in config["linear_attn_config"]["full_attn_layers"]]
    wide = dict(tensors)
    for layer in layers:
        for name, widen in change.items():
            full = f"model.layers.{layer}.self_attn.{name}"
            wide[full] = widen(tensors[full]).contiguous()
    sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": rope, "v_head_dim": value, "kv_lora_rank": LATENT}
    return wide, {**config, **sizes}


def _rows(weight: Tensor, rows: int) -> Tensor:
    """`weight` with zero rows behind it, `rows` in all."""
    return torch.cat([weight, weight.new_zeros(rows - weight.shape[0], *weight.shape[1:])])


def _pad_heads(weight: Tensor, heads: int, nope: int, wide: int) -> Tensor:
    """Zero rows between each head's first `nope` rows and the rest of it, so that they become `wide`."""
    per_head = weight.unflatten(0, (heads, -1))
    zeros = weight.new_zeros(heads, wide - nope, weight.shape[1])
    return torch.cat([per_head[:, :nope], zeros, per_head[:, nope:]], dim=1).flatten(0, 1)
