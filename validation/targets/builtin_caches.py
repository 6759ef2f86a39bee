"""What a request has in decode_impl's caches: as tensors of the whole model, and as a hash of what is stored."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor

from decode_impl.runner import ModelRunner
from numerics.formats import e4m3_decode


def caches_of(runner: ModelRunner, slot: int, pages: tuple[int, ...], length: int) -> dict[str, Tensor]:
    """A request's caches, ranks joined, in f32 on the CPU; `length` rows of the latent cache."""
    joined: dict[str, Tensor] = {}
    for layer in runner.weights.config.kda_layers:
        ranks = range(runner.weights.ranks)
        joined[f"layer.{layer}.state"] = torch.cat([runner.states.state[layer, r][slot].float() for r in ranks])
        windows = [runner.states.conv[layer, r][slot].float().unflatten(0, (3, -1)) for r in ranks]
        joined[f"layer.{layer}.conv"] = torch.cat(windows, dim=1).flatten(0, 1)
    for layer in runner.latents.layers:
        rows = runner.latents.gathered(layer, torch.tensor(pages))[:length]
        scale = runner.latents.scales[layer][1]
        joined[f"layer.{layer}.latent"] = e4m3_decode(rows) * scale if rows.dtype == torch.uint8 else rows.float()
    return {name: cache.cpu() for name, cache in joined.items()}


def state_hash(runner: ModelRunner, slot: int, pages: tuple[int, ...], length: int) -> str:
    """SHA-256 in hexadecimal of the live bytes of a request of `length` tokens.

    In order: `length` (8 bytes, little-endian); for every KDA layer by number, and every rank of it, the convolution
    window and the recurrent state in `slot`; for every MLA layer by number the latent rows of tokens 0 .. length-1.
    Bytes that no later step reads (other columns, rows behind the last token) are left out: they may hold anything.
    """
    states, latents = runner.states, runner.latents
    seen = sha256(length.to_bytes(8, "little"))
    for place in sorted(states.state):
        seen.update(_bytes(states.conv[place][slot]))
        seen.update(_bytes(states.state[place][slot]))
    for layer in sorted(latents.layers):
        seen.update(_bytes(latents.gathered(layer, torch.tensor(pages))[:length]))
    return seen.hexdigest()


def _bytes(stored: Tensor) -> bytes:
    return stored.contiguous().view(torch.uint8).cpu().numpy().tobytes()
