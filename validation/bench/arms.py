"""The two arms as the bench runs them: one set of weights, an op table and caches each, steps captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode_impl import generic
from decode_impl.batch import Batch, Chunk, build_batch
from decode_impl.caches import LatentCache, StateCache
from decode_impl.model import Step, forward
from decode_impl.ops import OpTable
from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.graphs import Capture, Shape, StepGraphs, cuda_capture, shape_of
from decode_impl.specialized.implementation import KERNELS, implementation, specialized_ops
from decode_impl.weights import ModelWeights

PAGE = 64


@dataclass(frozen=True)
class Tables:
    """Both arms' ops, and in words what each one runs."""

    generic: OpTable
    specialised: OpTable
    words: dict[str, str]


def tables_on(device: torch.device) -> Tables:
    """The tables of both arms on a device."""
    ran = implementation(device)
    if ran != KERNELS:
        words = {"generic": "the plain ops, torch eager", "specialised": "the EMULATION of the kernels, torch eager"}
        return Tables(generic.OPS, specialized_ops(device), words)
    from decode_impl.generic import gpu  # needs Triton, which a CPU installation of torch lacks

    words = {
        "generic": "cuBLAS in BF16; a Triton kernel for each norm, activation, gate, convolution, delta rule and "
        "router, split-KV attention; grouped MXFP4 expert kernels that widen in registers; CUDA graphs",
        "specialised": "the fused kernels, CUDA graphs",
    }
    return Tables(gpu.OPS, specialized_ops(device), words)


class StepArm:
    """One arm's caches, full to `context` tokens a request, and its steps: captured on CUDA, eager elsewhere."""

    def __init__(self, weights: ModelWeights, ops: OpTable, context: int, requests: int, width: int, seed: int) -> None:
        self.weights, self.ops, self.context, self.width = weights, ops, context, width
        self.device = weights.embedding.device
        self.pages = -(-(context + width) // PAGE)
        self.latents = LatentCache(weights, "fp8", requests * self.pages, PAGE)
        self.states = StateCache(weights, "f32", requests, width)
        generator = torch.Generator(self.device).manual_seed(seed)
        for layer in self.latents.layers.values():
            layer[1:].random_(0, 0x70, generator=generator)  # any byte below is a finite number
        self._graphs: StepGraphs | None = None

    def eager(self, batch: Batch) -> Step:
        """Run a step, op by op."""
        return forward(self.weights, self.ops, batch, self.latents, self.states)

    def capture(self, shapes: Sequence[Shape], capture: Capture | None = None) -> None:
        """Capture the steps of these shapes: by `capture`, else as the device can, which a CPU cannot."""
        if self.device.type == "cuda":
            capture = capture or cuda_capture(self.device)
        if capture:
            self._graphs = StepGraphs(self.eager, capture, shapes, PAGE, self.pages, self.device)

    def step(self, batch: Batch) -> Callable[[], Step]:
        """A call that runs this step: a replay where its shape was captured."""
        graphs = self._graphs
        if graphs is None:
            return lambda: self.eager(batch)
        if not graphs.holds(shape_of(batch)):
            raise KeyError(f"no step of shape {shape_of(batch)} was captured")
        return lambda: graphs.run(batch)[1]

    def batch(self, requests: int, seed: int) -> Batch:
        """A step of `requests` requests whose contexts are full, padded to its bin as the planner would."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary, columns = self.weights.config.vocab_size, self.states.columns
        tokens = torch.randint(0, vocabulary, (requests, self.width), generator=generator).tolist()
        chunks = []
        for request, row in enumerate(tokens):
            slot, first = columns * (1 + request), 1 + request * self.pages
            targets = range(slot, slot + self.width) if self.width > 1 else ()
            chunks.append(Chunk(row, self.context, slot, range(first, first + self.pages), targets))
        rows = batch_bin(requests * self.width)
        return build_batch(chunks, PAGE, self.pages, rows).to(self.device)

    def chosen_experts(self, batch: Batch) -> list[int]:
        """Different experts that an eager run of a step reads, by MoE layer."""
        counts: list[int] = []

        def route(**arguments: Any) -> tuple[Tensor, Tensor]:
            ids, weights = self.ops["route"](**arguments)
            counts.append(len(ids.unique()))
            return ids, weights

        forward(self.weights, {**self.ops, "route": route}, batch, self.latents, self.states)
        return counts
