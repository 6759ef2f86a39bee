"""The inverse of the export: a `K3Text` from a checkpoint's tensors, to train on or to teach a drafter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decode_impl.config import ModelConfig
from decode_impl.training.model import K3Text
from numerics.formats import mxfp4_dequantise

_MIXERS = {
    "attention_mix": ("self_attention_res", "input_layernorm"),
    "mlp_mix": ("mlp_res", "post_attention_layernorm"),
}
_KDA = {
    "in_proj": tuple(f"{x}_proj" for x in ("q", "k", "v", "g", "f_a", "b")),
    "conv": tuple(f"{x}_conv1d" for x in "qkv"),
    **{name: (name,) for name in ("f_b_proj", "o_norm", "o_proj")},
}
_MLA = {
    "a_proj": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    **{name: (name,) for name in ("q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj", "o_proj")},
}
_MLP = {"gate_up": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MOE = {
    "gate": ("gate",),
    "down": ("routed_expert_down_proj",),
    "norm": ("routed_expert_norm",),
    "up": ("routed_expert_up_proj",),
    **{f"shared_experts.{name}": tuple(f"shared_experts.{part}" for part in parts) for name, parts in _MLP.items()},
}


def restore(config: ModelConfig, tensors: Mapping[str, Tensor]) -> K3Text:
    """The training model whose export is `tensors` (upstream names); its masters are the stored values in FP32."""
    model = K3Text(config)
    state = {
        "embed_tokens": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "lm_head": tensors["lm_head.weight"],
        "output_mix.norm": tensors["model.output_attn_res_norm.weight"],
        "output_mix.proj": tensors["model.output_attn_res_proj.weight"].squeeze(0),
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for name, (stem, out_norm) in _MIXERS.items():
            state[f"{ours}{name}.norm"] = tensors[f"{theirs}{stem}_norm.weight"]
            state[f"{ours}{name}.proj"] = tensors[f"{theirs}{stem}_proj.weight"].squeeze(0)
            state[f"{ours}{name}.out_norm"] = tensors[f"{theirs}{out_norm}.weight"]
        attention, names = theirs + "self_attn.", _MLA if config.is_mla(i) else _KDA
        state |= _joined(tensors, attention, ours + "self_attn.", names)
        extra = ("k_scale", "q_scale") if config.is_mla(i) else ("A_log", "dt_bias")
        state |= {f"{ours}self_attn.{name}": tensors[attention + name].squeeze() for name in extra}
        if config.is_dense(i):
            state |= _joined(tensors, theirs + "mlp.", ours + "mlp.", _MLP)
        else:
            state |= _moe(config, tensors, theirs + "block_sparse_moe.", ours + "mlp.")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def _joined(
    tensors: Mapping[str, Tensor], theirs: str, ours: str, names: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    joined = {n: torch.cat([tensors[f"{theirs}{part}.weight"] for part in parts]) for n, parts in names.items()}
    return {ours + name: tensor.squeeze(1) if name == "conv" else tensor for name, tensor in joined.items()}


def _moe(config: ModelConfig, tensors: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    def experts(part: str) -> Tensor:
        stem = [f"{theirs}experts.{e}.{part}.weight" for e in range(config.num_experts)]
        return torch.stack([mxfp4_dequantise(tensors[f"{s}_packed"], tensors[f"{s}_scale"]) for s in stem])

    return {
        **_joined(tensors, theirs, ours, _MOE),
        f"{ours}e_score_correction_bias": tensors[f"{theirs}gate.e_score_correction_bias"],
        f"{ours}w13": torch.cat([experts("w1"), experts("w3")], 1),
        f"{ours}w2": experts("w2"),
    }
