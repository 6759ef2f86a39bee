"""Random checkpoints of any K3-family size, for unit tests and benchmarks.

Their margins are noise: accuracy is never judged on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decode_impl.checkpoint import Checkpoint, Spec, expected_tensors, fp8_scale_names
from decode_impl.config import ModelConfig
from numerics.formats import mxfp4_quantise

_FP8_SCALES = (0.043, 0.071)


def random_checkpoint(config: ModelConfig, seed: int) -> Checkpoint:
    """A checkpoint with the scales of a trained one: unit-variance projections, norms near 1, slow and fast decays.

    The FP8 scales are neither 1 nor powers of two, since those hide a scale that is dropped or applied twice.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, spec, generator)
        for name, spec in expected_tensors(config).items()
        if not name.endswith(("_packed", "_scale"))
    }
    for name, (shape, _) in expected_tensors(config).items():
        if name.endswith("_packed"):
            weight = torch.randn(shape[0], shape[1] * 2, generator=generator) / math.sqrt(shape[1] * 2)
            tensors[name], tensors[name.removesuffix("_packed") + "_scale"] = mxfp4_quantise(weight)
    for layer in config.full_attention_layers:
        tensors |= {name: torch.tensor(s) for name, s in zip(fp8_scale_names(layer), _FP8_SCALES, strict=True)}
    return Checkpoint(config, tensors, f"random-{config.name}-{seed}")


def _random(name: str, spec: Spec, generator: torch.Generator) -> Tensor:
    shape, dtype = spec
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        values = torch.log(torch.rand(shape, generator=generator) * 15 + 1)
    elif name.endswith("dt_bias"):
        values = noise * 0.5 - 3.0
    elif name.endswith("e_score_correction_bias"):
        values = noise * 0.05
    elif "norm" in name.rsplit(".", 2)[-2]:
        values = 1.0 + 0.1 * noise
    elif "conv1d" in name:
        values = 0.5 * noise
    elif "embed_tokens" in name:
        values = noise
    else:
        values = noise / math.sqrt(shape[-1]) * (4.0 if name.startswith("lm_head") else 1.0)
    return values.to(dtype)
