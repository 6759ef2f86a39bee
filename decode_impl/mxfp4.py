"""Expert weights in MXFP4: the packed form that is stored, and its exact dequantised form for matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numerics.formats import MXFP4_BLOCK, mxfp4_dequantise

_KEPT = 2**28
"""Bytes of packed weights whose dense form is made and kept: it is eight times as large."""


@dataclass(frozen=True)
class MXFP4Weight:
    """Weights of all experts. packed: u8 [E, out, in/2], low nibble first; scale: u8 (E8M0) [E, out, in/32]."""

    packed: Tensor
    scale: Tensor

    @cached_property
    def dense(self) -> Tensor:
        """The exact values, f32 [E, out, in]; made once and kept."""
        return mxfp4_dequantise(self.packed, self.scale, torch.float32)

    def of(self, experts: int | Tensor) -> Tensor:
        """The exact values of one expert, [out, in], or of several; as `dense`, which is not made for a huge pool."""
        if self.packed.numel() <= _KEPT:
            return self.dense[experts]
        return mxfp4_dequantise(self.packed[experts], self.scale[experts], torch.float32)

    @property
    def out_features(self) -> int:
        """Rows of every expert's matrix."""
        return self.packed.shape[1]

    @property
    def in_features(self) -> int:
        """Columns of every expert's matrix."""
        return self.packed.shape[2] * 2

    def rows(self, index: Tensor) -> MXFP4Weight:
        """The rows `index` (i64) of every expert."""
        return MXFP4Weight(self.packed[:, index].contiguous(), self.scale[:, index].contiguous())

    def columns(self, start: int, stop: int) -> MXFP4Weight:
        """Columns start..stop of every expert, padded with zero codes to whole blocks.

        A rank whose share is narrower than a block keeps the block's scale, so the values stay exact.

        Raises:
            ValueError: the range straddles a block boundary without ending on one, or halves a byte.
        """
        first, last = start // MXFP4_BLOCK, -(-stop // MXFP4_BLOCK)
        aligned = start % MXFP4_BLOCK == 0 and stop % MXFP4_BLOCK == 0
        part_of_one = last - first == 1 and start % 2 == 0 and stop % 2 == 0
        if not aligned and not part_of_one:
            raise ValueError(
                f"columns {start}..{stop} cut an MXFP4 block of {MXFP4_BLOCK}; use whole blocks, or whole bytes of one"
            )
        packed = self.packed[:, :, start // 2 : stop // 2]
        missing = (last - first) * MXFP4_BLOCK // 2 - packed.shape[2]
        padded = torch.nn.functional.pad(packed, (0, missing))
        return MXFP4Weight(padded.contiguous(), self.scale[:, :, first:last].contiguous())
