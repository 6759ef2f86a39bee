"""From a trained `K3Text` to a Hugging Face checkpoint: upstream's names, MXFP4 experts, BF16 elsewhere.

python -m decode_impl.training.export STATE.pt FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from decode_impl.config import ModelConfig
from decode_impl.presets import K3_MINI
from decode_impl.training.model import KDA, MLA, MLP, K3Text, LatentMoE, Layer, Mixer
from decode_impl.training.state import load_state
from decode_impl.training.tokenizer import tokenizer_files
from numerics.formats import bf16, mxfp4_quantise

QUANTIZATION_CONFIG: dict[str, Any] = {"quant_method": "mxfp4"}
"""Makes upstream read the routed experts as MXFP4 and everything else unquantised."""


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a checkpoint that this module writes."""
    return {**config.to_hf(), "name": config.name, "quantization_config": QUANTIZATION_CONFIG}


def export_tensors(model: K3Text) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by upstream's name.

    Dense weights, norms and convolutions BF16; `A_log` [1,1,h,1], `dt_bias`, the router bias and the scalar FP8
    scales FP32; w1, w2, w3 of a routed expert as `weight_packed` u8 [out,in/2] and `weight_scale` u8 [out,in/32].
    """
    tensors = {
        "model.embed_tokens.weight": bf16(model.embed_tokens),
        "model.norm.weight": bf16(model.norm),
        "lm_head.weight": bf16(model.lm_head),
        **_mixer("model.output_attn_res", model.output_mix),
    }
    for i, module in enumerate(model.layers):
        assert isinstance(module, Layer)
        layer = f"model.layers.{i}."
        tensors |= _mixer(layer + "self_attention_res", module.attention_mix, layer + "input_layernorm")
        tensors |= _mixer(layer + "mlp_res", module.mlp_mix, layer + "post_attention_layernorm")
        attention = module.self_attn
        name = layer + "self_attn."
        tensors |= _kda(name, attention) if isinstance(attention, KDA) else _mla(name, attention)
        if isinstance(module.mlp, MLP):
            tensors |= _mlp(layer + "mlp.", module.mlp)
        else:
            tensors |= _moe(layer + "block_sparse_moe.", module.mlp)
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _mixer(name: str, mixer: Mixer, out_norm: str | None = None) -> dict[str, Tensor]:
    tensors = {f"{name}_norm.weight": bf16(mixer.norm), f"{name}_proj.weight": bf16(mixer.proj).unsqueeze(0)}
    if out_norm is not None and mixer.out_norm is not None:
        tensors[f"{out_norm}.weight"] = bf16(mixer.out_norm)
    return tensors


def _kda(name: str, module: KDA) -> dict[str, Tensor]:
    size = module.o_proj.shape[1]
    q, k, v, g, f_a, beta = bf16(module.in_proj).split([size, size, size, *module.sizes[1:]])
    conv = bf16(module.conv).unsqueeze(1).chunk(3)
    return {
        **{f"{name}{x}_proj.weight": w for x, w in {"q": q, "k": k, "v": v, "g": g, "f_a": f_a, "b": beta}.items()},
        **{f"{name}{x}_conv1d.weight": w for x, w in zip("qkv", conv, strict=True)},
        f"{name}f_b_proj.weight": bf16(module.f_b_proj),
        f"{name}A_log": module.A_log.float().view(1, 1, -1, 1),
        f"{name}dt_bias": module.dt_bias.float(),
        f"{name}o_norm.weight": bf16(module.o_norm),
        f"{name}o_proj.weight": bf16(module.o_proj),
    }


def _mla(name: str, module: MLA) -> dict[str, Tensor]:
    q_rank, kv_rank, rope, values = module.sizes
    q_a, kv_a, gate = bf16(module.a_proj).split([q_rank, kv_rank + rope, values])
    return {
        f"{name}q_a_proj.weight": q_a,
        f"{name}q_a_layernorm.weight": bf16(module.q_a_layernorm),
        f"{name}q_b_proj.weight": bf16(module.q_b_proj),
        f"{name}kv_a_proj_with_mqa.weight": kv_a,
        f"{name}kv_a_layernorm.weight": bf16(module.kv_a_layernorm),
        f"{name}kv_b_proj.weight": bf16(module.kv_b_proj),
        f"{name}g_proj.weight": gate,
        f"{name}o_proj.weight": bf16(module.o_proj),
        f"{name}k_scale": module.k_scale.float(),
        f"{name}q_scale": module.q_scale.float(),
    }


def _mlp(name: str, module: MLP) -> dict[str, Tensor]:
    gate, up = bf16(module.gate_up).chunk(2)
    return {
        f"{name}gate_proj.weight": gate,
        f"{name}up_proj.weight": up,
        f"{name}down_proj.weight": bf16(module.down_proj),
    }


def _moe(name: str, module: LatentMoE) -> dict[str, Tensor]:
    tensors = {
        f"{name}gate.weight": bf16(module.gate),
        f"{name}gate.e_score_correction_bias": module.e_score_correction_bias.float(),
        f"{name}routed_expert_down_proj.weight": bf16(module.down),
        f"{name}routed_expert_norm.weight": bf16(module.norm),
        f"{name}routed_expert_up_proj.weight": bf16(module.up),
        **_mlp(f"{name}shared_experts.", module.shared_experts),
    }
    w1, w3 = module.w13.detach().chunk(2, 1)
    for part, weight in (("w1", w1), ("w2", module.w2.detach()), ("w3", w3)):
        packed, scale = mxfp4_quantise(weight.float())
        for expert in range(weight.shape[0]):
            tensors[f"{name}experts.{expert}.{part}.weight_packed"] = packed[expert]
            tensors[f"{name}experts.{expert}.{part}.weight_scale"] = scale[expert]
    return tensors


def write_checkpoint(model: K3Text, folder: Path, card: str) -> int:
    """Write the checkpoint folder and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export_tensors(model.cpu()), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config.json": hf_config(model.config), **tokenizer_files()}.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    """Export a training state, or a random model of the same shape."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("state", type=Path, help="folder written by train.py, or the word random")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--card", type=Path, help="model card to put beside the weights")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = K3Text(K3_MINI)
    if str(arguments.state) != "random":
        load_state(model, arguments.state)
    card = arguments.card.read_text(encoding="utf-8") if arguments.card else "# k3-mini\n\nNo card was given.\n"
    print(f"{write_checkpoint(model, arguments.folder, card)} bytes in {arguments.folder}")


if __name__ == "__main__":
    main()
