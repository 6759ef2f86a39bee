"""Runs steps of a model on one of its paths, and counts which path ran and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_impl import generic
from decode_impl.batch import Batch, Chunk
from decode_impl.caches import LatentCache, StateCache
from decode_impl.deployment import Deployment, DeploymentError
from decode_impl.model import forward
from decode_impl.ops import OpTable
from decode_impl.parts import PARTS, PartTable
from decode_impl.specialized import emulation
from decode_impl.specialized.plan import Decision, require_agreement
from decode_impl.specialized.requirements import unsupported
from decode_impl.weights import ModelWeights

GENERIC, SPECIALIZED = "generic", "specialized"


@dataclass(frozen=True)
class Paths:
    """The op tables of both paths."""

    generic: OpTable
    specialized: OpTable


BUILTIN_PATHS = Paths(generic.OPS, emulation.OPS)
"""The generic path and, on every device so far, the emulation of the specialised one."""


@dataclass(frozen=True)
class StepResult:
    """Logits f32 [m, vocab] of the wanted rows, and the path that computed them."""

    logits: Tensor
    path: str


class ModelRunner:
    """Weights, caches, paths and parts of one deployment. Requests' slots and pages are the caller's to manage.

    Raises:
        DeploymentError: the specialised path was asked for and refuses; every reason is listed.
    """

    def __init__(
        self,
        weights: ModelWeights,
        deployment: Deployment,
        paths: Paths = BUILTIN_PATHS,
        parts: PartTable = PARTS,
    ) -> None:
        self.specialized_on = deployment.decode_backend == "latency_specialized"
        if self.specialized_on:
            reasons = unsupported(weights.config, deployment)
            if reasons:
                raise DeploymentError("decode_backend latency_specialized is refused: " + "; ".join(reasons))
        self.weights, self.deployment, self.paths, self.parts = weights, deployment, paths, parts
        self.latents: LatentCache = parts["latent_cache"](
            weights, deployment.kv_cache_dtype, deployment.pool_pages, deployment.page_size
        )
        self.states: StateCache = parts["state_cache"](weights, deployment.state_dtype, deployment.max_batch)
        self.steps: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], all_logits: bool = False) -> StepResult:
        """Run one step over `chunks`. Logits come in the order of the chunks: the last row of each, or all rows.

        A step without chunks runs nothing and is not counted as a step.
        """
        decision = self._decide(chunks, all_logits)
        if not chunks:
            return StepResult(self.weights.norm.new_zeros(0, self.weights.config.vocab_size).float(), GENERIC)
        path, ops = GENERIC, self.paths.generic
        if decision.specialized:
            path, ops = SPECIALIZED, self.paths.specialized
        batch: Batch = self.parts["build_batch"](
            chunks, self.deployment.page_size, self.deployment.max_pages, decision.bin or 0, all_logits
        )
        on_device = batch.to(self.weights.embedding.device)
        logits = forward(self.weights, ops, on_device, self.latents, self.states)
        self.steps[path] += 1
        return StepResult(logits, path)

    def _decide(self, chunks: Sequence[Chunk], all_logits: bool) -> Decision:
        decision = require_agreement([self.parts["plan"](chunks, all_logits) for _ in range(self.weights.ranks)])
        if not self.specialized_on:
            return Decision(None, decision.reason)
        if decision.reason:
            self.fallbacks[decision.reason] += 1
        return decision
