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
from decode_impl.drafter.drafter import Drafter
from decode_impl.drafter.model import DrafterModel
from decode_impl.model import Step, forward
from decode_impl.ops import OpTable
from decode_impl.parts import PARTS, PartTable
from decode_impl.specialized import emulation
from decode_impl.specialized.graphs import StepGraphs, cuda_capture, shapes
from decode_impl.specialized.implementation import specialized_ops
from decode_impl.specialized.plan import Decision, Fallback, require_agreement
from decode_impl.specialized.requirements import unsupported
from decode_impl.weights import ModelWeights

GENERIC, SPECIALIZED = "generic", "specialized"


@dataclass(frozen=True)
class Paths:
    """The op tables of both paths."""

    generic: OpTable
    specialized: OpTable


BUILTIN_PATHS = Paths(generic.OPS, emulation.OPS)
"""The generic path and the emulation of the specialised one, as a CPU runs them."""


def paths_on(device: torch.device) -> Paths:
    """The op tables that a runner on `device` uses unless it is given others."""
    return Paths(generic.OPS, specialized_ops(device))


@dataclass(frozen=True)
class StepResult:
    """Logits f32 [m, vocab] of the wanted rows, `counts` of them for every chunk, and the path that computed them."""

    logits: Tensor
    path: str
    counts: Sequence[int]

    def by_chunk(self) -> tuple[Tensor, ...]:
        """The logits of every chunk, f32 [rows, vocab] each."""
        return tuple(torch.split(self.logits, list(self.counts)))


class ModelRunner:
    """Weights, caches, paths and parts of one deployment. Requests' slots and pages are the caller's to manage.

    With `deployment.drafts` a drafter observes every step, and the state cache has a column per draft.

    Raises:
        DeploymentError: the specialised path was asked for and refuses, with every reason; or drafts were asked for and
            there is no drafter that makes so many; or graphs on a device that has none.
        DrafterError: the drafter was made for a target of another shape.
    """

    def __init__(
        self,
        weights: ModelWeights,
        deployment: Deployment,
        paths: Paths | None = None,
        parts: PartTable = PARTS,
        drafter: DrafterModel | None = None,
    ) -> None:
        self.specialized_on = deployment.decode_backend == "latency_specialized"
        if self.specialized_on:
            reasons = unsupported(weights.config, deployment)
            if reasons:
                raise DeploymentError("decode_backend latency_specialized is refused: " + "; ".join(reasons))
        self.weights, self.deployment, self.parts = weights, deployment, parts
        self.paths = paths or paths_on(weights.embedding.device)
        self.latents: LatentCache = parts["latent_cache"](
            weights,
            deployment.kv_cache_dtype,
            deployment.pool_pages,
            deployment.page_size,
            deployment.context_parallel,
        )
        self.states: StateCache = parts["state_cache"](
            weights, deployment.state_dtype, deployment.max_batch, 1 + deployment.drafts
        )
        self.drafter = self._place(drafter)
        self.steps: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.graphs = self._captured() if deployment.graphs else None

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], all_logits: bool = False) -> StepResult:
        """Run one step over `chunks`. Logits come in the order of the chunks: all rows of a verify chunk and the last
        of every other, or all rows.

        A step without chunks runs nothing and is not counted as a step.
        """
        decision = self._decide(chunks, all_logits)
        if not chunks:
            return StepResult(self.weights.norm.new_zeros(0, self.weights.config.vocab_size).float(), GENERIC, ())
        path, ops = GENERIC, self.paths.generic
        if decision.specialized:
            path, ops = SPECIALIZED, self.paths.specialized
        batch: Batch = self.parts["build_batch"](
            chunks, self.deployment.page_tokens, self.deployment.max_pages, decision.bin or 0, all_logits
        )
        if self.graphs and decision.specialized:
            on_device, step = self.graphs.run(batch)
        else:
            on_device = batch.to(self.weights.embedding.device)
            step = self._forward(ops, on_device)
        if self.drafter:
            self.drafter.observe(step.taps, on_device.positions, on_device.indices)
        self.steps[path] += 1
        return StepResult(step.logits, path, batch.logit_counts)

    def _forward(self, ops: OpTable, batch: Batch) -> Step:
        taps = self.drafter.taps if self.drafter else ()
        return forward(self.weights, ops, batch, self.latents, self.states, taps)

    @torch.inference_mode()
    def _captured(self) -> StepGraphs:
        """Every specialised step of this deployment, captured."""
        device, deployment = self.weights.embedding.device, self.deployment
        if device.type != "cuda" or not self.specialized_on:
            raise DeploymentError(
                "graphs need decode_backend latency_specialized on a CUDA device, "
                f"given are {deployment.decode_backend} and {device.type}; leave graphs out"
            )
        return StepGraphs(
            lambda batch: self._forward(self.paths.specialized, batch),
            cuda_capture(device),
            shapes(deployment.max_batch, deployment.drafts),
            deployment.page_tokens,
            deployment.max_pages,
            device,
        )

    def _place(self, model: DrafterModel | None) -> Drafter | None:
        """The drafter beside this runner's caches; None without speculation."""
        deployment = self.deployment
        if not deployment.drafts:
            return None
        if model is None:
            raise DeploymentError(f"drafts is {deployment.drafts}, but no drafter was given; use drafts 0 or give one")
        if deployment.drafts > model.config.max_drafts:
            raise DeploymentError(
                f"drafts is {deployment.drafts}, the drafter makes at most {model.config.max_drafts} in one pass"
            )
        placed: Drafter = self.parts["drafter"](model, self.weights, deployment.pool_pages, deployment.page_tokens)
        return placed

    def _decide(self, chunks: Sequence[Chunk], all_logits: bool) -> Decision:
        decisions = [self.parts["plan"](chunks, all_logits) for _ in range(self.weights.ranks)]
        decision = require_agreement(decisions, self.steps.total() + 1)
        if not self.specialized_on:
            return Decision(None, decision.reason)
        if decision.bin and self.graphs:
            width = len(chunks[0].tokens)
            if not self.graphs.holds((decision.bin, width)):
                decision = Decision(None, Fallback.MISSING_GRAPH)
        if decision.reason:
            self.fallbacks[decision.reason] += 1
        return decision
