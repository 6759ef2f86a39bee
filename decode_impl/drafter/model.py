"""The drafter's mathematics, used alike for drafting and for training.

What it knows of the text so far comes from the target's tapped hidden states. Each token that ran through the target
has a *latent*, and from it *context rows*: keys and values for every layer of the drafter. A block starts at an
*anchor*, the last committed token, which the target has not run yet: row 0 of the block embeds it, the rows behind it
are placeholders, all rows add the latent of the token before the anchor, and row j guesses the token j + 1 places after
the anchor. Rows of a block see each other and all context rows before the anchor. Only the Markov head is sequential:
it shifts each row's logits by the token before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode_impl.drafter.config import DrafterConfig


def rotate(x: Tensor, indices: Tensor, theta: float) -> Tensor:
    """Rotary embedding. x: [..., heads, d]; indices: the tokens' places, of shape [...]. Pairs are (i, i + d/2)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = indices[..., None, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(gain * torch.randn(rows, columns) / math.sqrt(columns))


class DrafterLayer(nn.Module):
    """Attention of block rows over context and block, then a gated MLP.

    N sequences of T context tokens, A anchors each, blocks of B rows; a row of keys and values is [2 * heads * d].
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        inner = c.heads * c.head_dim
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q_proj = _matrix(inner, c.hidden_size)
        self.block_proj = _matrix(c.latent_size, c.hidden_size)
        self.kv_norm = nn.Parameter(torch.ones(c.latent_size))
        self.kv_proj = _matrix(2 * inner, c.latent_size)
        self.o_proj = _matrix(c.hidden_size, inner, 0.1)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = _matrix(2 * c.mlp_size, c.hidden_size)
        self.down_proj = _matrix(c.hidden_size, c.mlp_size, 0.1)

    def keys_values(self, latent: Tensor, indices: Tensor) -> Tensor:
        """latent: [..., latent_size] of the tokens at places `indices` [...]. Returns [..., 2 * heads * d]."""
        c = self.config
        normed = F.rms_norm(latent, (c.latent_size,), self.kv_norm, c.eps)
        keys, values = F.linear(normed, self.kv_proj).chunk(2, dim=-1)
        keys = rotate(keys.unflatten(-1, (c.heads, c.head_dim)), indices, c.rope_theta).flatten(-2)
        return torch.cat([keys, values], dim=-1)

    def forward(self, x: Tensor, places: Tensor, context: Tensor) -> Tensor:
        """x: [N, A, B, H], the rows at `places` i64 [N, A, B]; context: [N, T, 2 * heads * d]. Returns [N, A, B, H]."""
        c = self.config
        h = F.rms_norm(x, (c.hidden_size,), self.attention_norm, c.eps)
        q = rotate(F.linear(h, self.q_proj).unflatten(-1, (c.heads, c.head_dim)), places, c.rope_theta)
        block = self.keys_values(F.linear(h, self.block_proj), places)
        x = x + F.linear(self._attend(q, context, places[..., 0], block), self.o_proj)
        gate, up = F.linear(F.rms_norm(x, (c.hidden_size,), self.mlp_norm, c.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down_proj)

    def _attend(self, q: Tensor, context: Tensor, lengths: Tensor, block: Tensor) -> Tensor:
        """q: [N, A, B, heads, d]; lengths: i64 [N, A], context rows that blocks see; block: [N, A, B, as context]."""
        c = self.config
        k_ctx, v_ctx = context.unflatten(-1, (2, c.heads, c.head_dim)).unbind(-3)
        k_blk, v_blk = block.unflatten(-1, (2, c.heads, c.head_dim)).unbind(-3)
        unseen = torch.arange(context.shape[1], device=q.device) >= lengths.unsqueeze(-1)
        before = torch.einsum("nabhd,nthd->nhabt", q, k_ctx).masked_fill(unseen[:, None, :, None], -torch.inf)
        inside = torch.einsum("nabhd,nachd->nhabc", q, k_blk)
        weights = (torch.cat([before, inside], dim=-1) * c.head_dim**-0.5).softmax(-1)
        seen, own = weights.split([context.shape[1], block.shape[2]], dim=-1)
        mixed = torch.einsum("nhabt,nthd->nabhd", seen, v_ctx) + torch.einsum("nhabc,nachd->nabhd", own, v_blk)
        return mixed.flatten(-2)


class DrafterModel(nn.Module):
    """The drafter's own parameters; embedding and output head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.context_proj = _matrix(c.latent_size, len(c.taps) * c.hidden_size)
        self.last_proj = _matrix(c.hidden_size, c.latent_size)
        self.placeholders = nn.Parameter(torch.randn(c.max_drafts, c.hidden_size))
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(c.layers))
        self.output_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.markov_in = nn.Parameter(torch.randn(c.vocab_size, c.markov_rank) / math.sqrt(c.markov_rank))
        self.markov_out = nn.Parameter(torch.zeros(c.vocab_size, c.markov_rank))

    def latents(self, taps: Sequence[Tensor]) -> Tensor:
        """One latent [..., latent_size] per token that ran through the target. taps: one [..., H] per tap."""
        dtype, eps = self.context_proj.dtype, self.config.eps
        joined = torch.cat([F.rms_norm(tap.to(dtype), tap.shape[-1:], eps=eps) for tap in taps], dim=-1)
        return F.rms_norm(F.linear(joined, self.context_proj), (self.config.latent_size,), eps=eps)

    def context_rows(self, latents: Tensor, indices: Tensor) -> Tensor:
        """Keys and values of all layers, [..., row], of the tokens at places `indices` i64 [...]."""
        return torch.cat([layer.keys_values(latents, indices) for layer in self._layers()], dim=-1)

    def block_hidden(self, embedded: Tensor, last: Tensor, indices: Tensor, context: Tensor, drafts: int) -> Tensor:
        """Hidden states of whole blocks, normalised for the output head.

        embedded: [N, A, H], the anchors under the target's embedding; last: [N, A, latent_size], the latents of the
        tokens before them; indices: i64 [N, A], the anchors' places; context: [N, T, row], where row t belongs to the
        token at place t and only rows before the anchor are seen. Returns [N, A, drafts, H].
        """
        x = self.placeholders[:drafts] + F.linear(last, self.last_proj).unsqueeze(2)
        x = torch.cat([x[..., :1, :] + embedded.unsqueeze(2), x[..., 1:, :]], dim=2)
        places = indices.unsqueeze(-1) + torch.arange(drafts, device=indices.device)
        for layer, rows in zip(self._layers(), context.chunk(self.config.layers, dim=-1), strict=True):
            x = layer(x, places, rows)
        return F.rms_norm(x, (self.config.hidden_size,), self.output_norm, self.config.eps)

    def markov_bias(self, previous: Tensor) -> Tensor:
        """What the token before adds to a row's logits. previous: i64 [...]. Returns [..., vocab]."""
        return F.linear(self.markov_in[previous], self.markov_out)

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]


def stored_as_mxfp4(name: str) -> bool:
    """True for the parameters that a checkpoint holds in MXFP4: every projection, along its input axis."""
    return name.endswith("_proj") or name.endswith("gate_up")
