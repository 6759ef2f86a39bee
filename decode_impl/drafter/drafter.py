"""A drafter at work beside its target: a paged cache of what it knows, and drafts from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode_impl.drafter.config import DrafterError
from decode_impl.drafter.model import DrafterModel
from decode_impl.weights import ModelWeights
from numerics.formats import bf16

NO_DRAFT = -1
"""Stands where there is no draft; never a token."""


class Drafter:
    """Drafts for the requests of one engine.

    Its cache has the pages of the target's latent cache, under the same numbers: a page that is shared with a cached
    prefix brings the drafter's rows along. Page 0 is null.

    Raises:
        DrafterError: the drafter was made for a target of another shape.
    """

    def __init__(self, model: DrafterModel, weights: ModelWeights, pages: int, page_size: int) -> None:
        c, target = model.config, weights.config
        problems = [
            (c.vocab_size != target.vocab_size, f"its vocabulary is {c.vocab_size}, the model's {target.vocab_size}"),
            (
                c.hidden_size != target.hidden_size,
                f"its hidden size is {c.hidden_size}, the model's {target.hidden_size}",
            ),
            (
                c.taps[-1] > target.num_hidden_layers,
                f"it taps {c.taps}, the model has {target.num_hidden_layers} layers",
            ),
        ]
        if any(wrong for wrong, _ in problems):
            raise DrafterError("the drafter does not fit: " + "; ".join(text for wrong, text in problems if wrong))
        device = weights.embedding.device
        self.model = model.to(device)
        self.taps, self.max_drafts = c.taps, c.max_drafts
        self._embedding = weights.embedding.float()
        self._head = torch.cat([part.float() for part in weights.lm_head])
        self.cache = torch.zeros(pages + 1, page_size, c.row, dtype=torch.bfloat16, device=device)
        self.latents = torch.zeros(pages + 1, page_size, c.latent_size, dtype=torch.bfloat16, device=device)

    @torch.inference_mode()
    def observe(self, taps: Sequence[Tensor], positions: Tensor, indices: Tensor) -> None:
        """Write the latents and context rows of tokens that ran through the target.

        taps: one [n, H] per tap; positions: i64 [n], page * page_size + offset, inside page 0 = padding, not written;
        indices: i64 [n], the tokens' places in their requests.
        """
        live = (positions >= self.cache.shape[1]).nonzero().squeeze(-1)
        latents = self.model.latents([tap[live] for tap in taps])
        rows = self.model.context_rows(latents, indices[live])
        self.latents.view(-1, self.latents.shape[-1])[positions[live]] = bf16(latents)
        self.cache.view(-1, self.cache.shape[-1])[positions[live]] = bf16(rows)

    @torch.inference_mode()
    def draft(self, anchors: Tensor, indices: Tensor, block_table: Tensor, count: int) -> Tensor:
        """Greedy drafts behind each request's last committed token. Ties go to the lowest token id.

        anchors: i64 [n], the tokens; indices: i64 [n], their places; block_table: i64 [n, max_pages].
        Returns i64 [n, count]; a request whose logits are not finite gets no drafts: its row is `NO_DRAFT`.
        """
        return self.propose(anchors, indices, block_table, count, lambda _, logits: logits.argmax(-1))

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        indices: Tensor,
        block_table: Tensor,
        count: int,
        choose: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """As `draft`, with `choose(row, logits f32 [n, vocab])` picking every row's tokens, i64 [n]."""
        logits = self._block_logits(anchors, indices, block_table, count)
        drafts, usable = [anchors], torch.ones_like(anchors, dtype=torch.bool)
        for row in range(count):
            shifted = logits[:, row] + self.model.markov_bias(drafts[-1])
            usable &= shifted.isfinite().all(-1)
            # A row that means nothing is chosen from all the same: its request gets no drafts, and no other is hurt.
            drafts.append(choose(row, shifted.masked_fill(~usable[:, None], 0.0)))
        return torch.stack(drafts[1:], dim=1).masked_fill(~usable[:, None], NO_DRAFT)

    def _block_logits(self, anchors: Tensor, indices: Tensor, block_table: Tensor, count: int) -> Tensor:
        """Logits f32 [n, count, vocab] of every request's block, before the Markov head."""
        page_size = self.cache.shape[1]
        pages = -(-int(indices.max()) // page_size)
        context = self.cache[block_table[:, :pages]].flatten(1, 2).float()
        # Rows behind the anchor may hold anything, NaN included: they are removed, not weighed with zero.
        unseen = torch.arange(context.shape[1], device=context.device) >= indices[:, None]
        context = context.masked_fill(unseen[..., None], 0.0)
        page = block_table.gather(1, (indices - 1)[:, None] // page_size).squeeze(1)
        last = self.latents[page, (indices - 1) % page_size].float()
        embedded = self._embedding[anchors]
        hidden = self.model.block_hidden(embedded[:, None], last[:, None], indices[:, None], context, count)
        logits: Tensor = hidden[:, 0] @ self._head.T
        return logits
