"""Caches of a decode: paged latent rows for MLA, slots of conv window and recurrent state for KDA.

Page 0 and slot 0 (with speculation, the first slot of every column) are null: padded rows point at them, nobody owns
them, nothing ever writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_impl.parallel.context import in_order, local_positions
from decode_impl.weights import KdaWeights, MlaWeights, ModelWeights

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.uint8}
"""Latent-cache formats: BF16, or E4M3 bytes with a per-tensor scale."""

STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Formats of the recurrent state; BF16 is a known-worse control, not for use."""


class CacheFull(RuntimeError):
    """No free page or slot is left; the engine preempts a request when it sees this."""


class ScaleError(ValueError):
    """An FP8 cache was asked for, but a layer's scale is missing or is no positive finite number."""


class LatentCache:
    """Paged latent rows of every MLA layer, with reference-counted pages so that prefixes can share them.

    With context parallelism over `ranks` every rank has pools of its own, with `page_size` rows of every page; a page
    holds `page_tokens` tokens then (`parallel/context.py`). Without it ranks would hold the same rows: there is one.
    """

    def __init__(self, weights: ModelWeights, dtype: str, pages: int, page_size: int, ranks: int = 1) -> None:
        config = weights.config
        shape = (pages + 1, page_size, config.latent_row)
        device = weights.embedding.device
        layers = config.full_attention_layers
        self.scales = _checked_scales(weights, layers) if dtype == "fp8" else dict.fromkeys(layers, (1.0, 1.0))
        self.shards = [
            {i: torch.zeros(shape, dtype=KV_DTYPES[dtype], device=device) for i in layers} for _ in range(ranks)
        ]
        self.page_size, self.page_tokens = page_size, page_size * ranks
        self._free = list(range(pages, 0, -1))
        self._owners = [0] * (pages + 1)

    @property
    def layers(self) -> dict[int, Tensor]:
        """The pools of rank 0: all there are without context parallelism."""
        return self.shards[0]

    @property
    def sharded(self) -> bool:
        """Whether contexts are dealt out to ranks."""
        return len(self.shards) > 1

    def written_by(self, rank: int, positions: Tensor) -> Tensor:
        """Flat positions in `rank`'s pools of tokens at flat positions page * page_tokens + offset; null for tokens
        that another rank holds."""
        if not self.sharded:
            return positions
        return local_positions(positions, self.page_size, rank, len(self.shards))

    def gathered(self, layer: int, pages: Tensor) -> Tensor:
        """All rows of these pages in the order of their tokens, from the ranks that hold them: [tokens, row]."""
        return in_order([own[layer][pages].flatten(0, 1) for own in self.shards])

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free page.

        Raises:
            CacheFull: none is left.
        """
        if not self._free:
            raise CacheFull("no free page in the latent cache")
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Count one more owner of `page`."""
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Give up one ownership of `page`; it is free once nobody owns it."""
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free.append(page)


def _checked_scales(weights: ModelWeights, layers: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Query and key scale of every layer; all that are missing or unusable are named at once."""
    scales: dict[int, tuple[float, float]] = {}
    problems = []
    for layer in layers:
        rank = weights.layers[layer].attention[0]
        assert isinstance(rank, MlaWeights)
        named = {"k_scale": rank.k_scale, "q_scale": rank.q_scale}
        usable = {name: x for name, x in named.items() if x is not None and math.isfinite(x) and x > 0}
        problems += [f"{name} of layer {layer} is {x}" for name, x in named.items() if name not in usable]
        if len(usable) == len(named):
            scales[layer] = usable["q_scale"], usable["k_scale"]
    if problems:
        raise ScaleError(
            f"kv_cache_dtype fp8 needs a positive k_scale and q_scale in the checkpoint: {', '.join(problems)}; "
            "use kv_cache_dtype bf16 or a checkpoint with FP8 scales"
        )
    return scales


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of one slot's conv windows and states, per layer and rank."""

    conv: Sequence[Tensor]
    state: Sequence[Tensor]


class StateCache:
    """Conv window and recurrent state of every KDA layer and rank.

    A request owns `columns` consecutive slots: one, and with speculation one more per draft, so that a verify step
    keeps the state after each of its tokens and committing is choosing a column. The first `columns` slots are null.
    """

    def __init__(self, weights: ModelWeights, dtype: str, requests: int, columns: int = 1) -> None:
        self.columns = columns
        slots = (requests + 1) * columns
        config = weights.config
        device, d = weights.embedding.device, config.kda_head_dim
        self.conv: dict[tuple[int, int], Tensor] = {}
        self.state: dict[tuple[int, int], Tensor] = {}
        for layer in config.kda_layers:
            for rank, part in enumerate(weights.layers[layer].attention):
                assert isinstance(part, KdaWeights)
                window = (slots, 3 * part.heads * d, config.conv_kernel - 1)
                self.conv[layer, rank] = torch.zeros(window, dtype=torch.bfloat16, device=device)
                shape = (slots, part.heads, d, d)
                self.state[layer, rank] = torch.zeros(shape, dtype=STATE_DTYPES[dtype], device=device)
        self._free = list(range(requests * columns, 0, -columns))

    @property
    def free_slots(self) -> int:
        """Requests that still find slots."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a request's slots, return the first, and clear them: nobody may see the last owner's state.

        Raises:
            CacheFull: none is left.
        """
        if not self._free:
            raise CacheFull("no free slot in the state cache")
        slot = self._free.pop()
        for pool in (*self.conv.values(), *self.state.values()):
            pool[slot : slot + self.columns] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give a request's slots back, by the first."""
        self._free.append(slot)

    def snapshot(self, slot: int) -> StateSnapshot:
        """Copy a slot's contents."""
        return StateSnapshot(
            [pool[slot].clone() for pool in self.conv.values()],
            [pool[slot].clone() for pool in self.state.values()],
        )

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Overwrite a slot with a snapshot's contents."""
        for pool, saved in zip(self.conv.values(), snapshot.conv, strict=True):
            pool[slot] = saved
        for pool, saved in zip(self.state.values(), snapshot.state, strict=True):
            pool[slot] = saved
