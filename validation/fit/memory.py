"""What a model needs of a GPU's memory at the least: too much here is too much whatever the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from validation.fit.conditions import Kind, Unmet
from validation.fit.deployment import DeploymentFile
from validation.fit.hardware import GPUS

K3_WEIGHTS = 1_560_860_324_864
"""Bytes of the published checkpoint, 96 shards."""

_KV_BYTES = {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656}
"""Bytes of one token's latent row in one layer at K3's widths."""

_STATE_BYTES = {"fp32": 4, "bf16": 2}


def least_bytes(given: DeploymentFile, model: Mapping[str, Any]) -> float:
    """Bytes a GPU holds at the largest batch and the mean context: weights spread evenly, latent rows, KDA states."""
    linear = model["linear_attn_config"]
    ranks = given.parallel.tensor * given.parallel.pipeline
    tokens = sum(context * share for context, share in given.traffic.context.items())
    rows = len(linear["full_attn_layers"]) * _KV_BYTES[given.cache.kv] * tokens / given.parallel.decode_context
    head = linear["head_dim"] ** 2 * _STATE_BYTES[given.cache.recurrent_state]
    states = len(linear["kda_layers"]) * linear["num_heads"] * head * (1 + given.drafts) / given.parallel.tensor
    # Pipeline stages hold a share of the layers each.
    requests = max(given.traffic.batch) * (rows + states) / given.parallel.pipeline
    return float(K3_WEIGHTS / ranks + requests)


def too_large(given: DeploymentFile, model: Mapping[str, Any]) -> list[Unmet]:
    """Whether a model of K3's size cannot fit, and whether there are GPUs for all ranks."""
    found = []
    ranks = given.parallel.tensor * given.parallel.pipeline
    if given.hardware.count < ranks:
        found.append(Unmet(f"{given.hardware.count} GPUs, {ranks} ranks need one each", Kind.REFUSED))
    if given.max_context > model["max_position_embeddings"]:
        longest = model["max_position_embeddings"]
        found.append(Unmet(f"contexts to {given.max_context} tokens, the model has {longest}", Kind.REFUSED))
    if model["num_hidden_layers"] == 93 and model["hidden_size"] == 7168:
        need, there = least_bytes(given, model), GPUS[given.hardware.gpu].memory
        if need > there:
            found.append(
                Unmet(
                    f"at least {need / 1e9:.0f} GB a GPU at batch {max(given.traffic.batch)} and mean context, "
                    f"{given.hardware.gpu} has {there / 1e9:.0f}",
                    Kind.REFUSED,
                )
            )
    return found
