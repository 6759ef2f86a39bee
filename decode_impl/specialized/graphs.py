"""Whole specialised steps replayed from CUDA graphs: one per batch bin and verify width, over tensors that stay put.

A step's tensors are copied into those of its shape, then everything from the embedding to the logits is one launch.
Nothing is allocated in a replay, no value is read on the host, and no grid depends on a length. All graphs share one
memory pool, since a step's results are used before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from decode_impl.batch import Batch, build_batch
from decode_impl.model import Step
from decode_impl.specialized.contract import BATCH_BINS, MAX_ROWS, batch_bin

Shape = tuple[int, int]
"""Rows of a step's bin, and rows of each of its requests: 1 without drafts."""

Forward = Callable[[Batch], Step]
Capture = Callable[[Callable[[], Step]], tuple[Step, Callable[[], None]]]
"""Runs a step once and returns its results, which every later call of the function returned with them overwrites."""


def shapes(max_batch: int, drafts: int) -> list[Shape]:
    """The shapes of every specialised step that a deployment can have, smallest first."""
    widths = [1, 1 + drafts] if drafts else [1]
    return [
        (size, width)
        for width in widths
        for size in BATCH_BINS
        if width <= size <= batch_bin(min(MAX_ROWS, max_batch * width))
    ]


def shape_of(batch: Batch) -> Shape:
    """The shape of a specialised step."""
    return len(batch.tokens), batch.verify[0].targets.shape[1] if batch.verify else 1


class StepGraphs:
    """Captured steps by shape. `forward` runs a step eagerly; steps of null rows, which write nothing, are captured."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        wanted: Iterable[Shape],
        page_size: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        self._steps: dict[Shape, tuple[Batch, Step, Callable[[], None]]] = {}
        for rows, width in wanted:
            fixed = replace(null_batch(rows, width, page_size, max_pages).to(device), logit_rows=slice(None))
            self._steps[rows, width] = (fixed, *capture(partial(forward, fixed)))

    def holds(self, shape: Shape) -> bool:
        """Whether a step of this shape was captured."""
        return shape in self._steps

    def run(self, batch: Batch) -> tuple[Batch, Step]:
        """Replay the step of this batch's shape: its tensors on the device, and what came of it.

        `batch` may be on the host: it is copied once, to where the graph reads. Both results live until the next replay
        of this shape, the taps until the next of any.

        Raises:
            KeyError: no step of that shape was captured.
        """
        fixed, results, replay = self._steps[shape_of(batch)]
        for target, source in zip(_tensors(fixed), _tensors(batch), strict=True):
            target.copy_(source, non_blocking=True)
        replay()
        return fixed, Step(results.logits[batch.logit_rows], results.taps)


def null_batch(rows: int, width: int, page_size: int, max_pages: int) -> Batch:
    """A step of null rows alone, of the shape that `build_batch` gives to a step of requests of `width` rows."""
    return build_batch([], page_size, max_pages, rows, verify_width=width)


def _tensors(batch: Batch) -> list[Tensor]:
    """The inputs of a step without long chunks, in a fixed order, but for the rows whose logits are wanted."""
    own = [getattr(batch, field.name) for field in fields(batch) if field.name != "logit_rows"]
    verify = [x for rows in batch.verify for x in (rows.sources, rows.targets)]
    return [x for x in own if isinstance(x, Tensor)] + verify


def cuda_capture(device: torch.device) -> Capture:
    """Capture into CUDA graphs on one stream: its kernels' arrival counters are those of every replay."""
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Step]) -> tuple[Step, Callable[[], None]]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()  # kernels are compiled, and the stream's arrival counters made, before anything is captured
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            results = step()
        return results, graph.replay

    return capture
