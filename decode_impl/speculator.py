"""Speculation of an engine: asks the drafter, chooses tokens against drafts, counts what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decode_impl.acceptance import Acceptance
from decode_impl.drafter.drafter import NO_DRAFT
from decode_impl.request import Request
from decode_impl.runner import ModelRunner
from decode_impl.sampling import Stream, distribution, draw, uniform


class Speculator:
    """Drafts for the requests of one engine."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.acceptance = Acceptance(runner.deployment.drafts)

    def draft(self, requests: Sequence[Request]) -> None:
        """Give every decoding request the drafts of its next step, no more than it may still generate."""
        drafter, deployment = self.runner.drafter, self.runner.deployment
        for request in requests:
            request.drafts, request.draft_distributions = [], []
        ready = [
            r for r in requests if r.output and r.computed + 1 == len(r.tokens) and r.max_tokens > len(r.output) + 1
        ]
        if not drafter or not ready:
            return
        table = torch.zeros(len(ready), max(len(r.pages) for r in ready), dtype=torch.int64)
        for row, request in enumerate(ready):
            table[row, : len(request.pages)] = torch.tensor(request.pages)
        device = drafter.cache.device
        anchors = torch.tensor([r.output[-1] for r in ready]).to(device)
        places, table = torch.tensor([r.computed for r in ready]).to(device), table.to(device)
        if deployment.draft_sampling == "sampled":
            rows = drafter.propose(anchors, places, table, deployment.drafts, partial(_draw_drafts, ready))
        else:
            rows = drafter.draft(anchors, places, table, deployment.drafts)
        for request, drafts in zip(ready, rows.tolist(), strict=True):
            request.drafts = [] if NO_DRAFT in drafts else drafts[: request.max_tokens - len(request.output) - 1]

    def choose(self, request: Request, logits: Tensor, position: int, row: int, draft: int | None) -> int:
        """The token at `position`, from a verify step's row of logits, f32 [vocab]; `draft` is the guess at it.

        A draft that was its drafter's first choice is accepted where it equals the token that would be drawn without
        drafts, so that text depends on drafts by ties at most; for drafts that are certain of themselves this is the
        standard rejection rule. Drafts that were drawn from a distribution go through that rule itself.

        Raises:
            SamplingError: the logits hold NaN or infinity.
        """
        parts, seed = self.runner.parts, request.sampling.seed
        if draft is None or not request.draft_distributions:
            return int(parts["sample"](logits, request.sampling, position))
        p = distribution(logits, request.sampling, position)
        q = request.draft_distributions[row].to(p.device)
        numbers = uniform(seed, position, Stream.ACCEPT), uniform(seed, position, Stream.RESIDUAL)
        token, _ = parts["accept"](p, q, draft, *numbers)
        return int(token)


def _draw_drafts(requests: Sequence[Request], row: int, logits: Tensor) -> Tensor:
    """Draw the drafts of one row under each request's sampling, and keep what they were drawn from."""
    tokens = []
    for request, own in zip(requests, logits.cpu(), strict=True):
        position = request.computed + 1 + row
        request.draft_distributions.append(distribution(own, request.sampling, position))
        number = uniform(request.sampling.seed, position, Stream.DRAFT)
        tokens.append(draw(request.draft_distributions[-1], number))
    return torch.tensor(tokens, device=logits.device)
