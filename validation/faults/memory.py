"""What a kernel reads when it computes an address wrongly."""

from __future__ import annotations

import torch
from torch import Tensor


def as_if_dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes the row stride of a 2-D `x` for its width."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def as_if_first(x: Tensor) -> Tensor:
    """What a kernel reads that takes `x` to begin where its storage does."""
    return x.as_strided(x.shape, x.stride(), 0)


def as_if_side_by_side(x: Tensor) -> Tensor:
    """What a kernel reads that takes the outer stride of a 3-D `x` for as many inner ones as it has entries."""
    return x.as_strided(x.shape, (x.shape[1] * x.stride(1), *x.stride()[1:]), x.storage_offset())


def wrapped(index: Tensor, stride: int, bits: int = 32) -> Tensor:
    """The index that `index * stride` leads to in so many bits, two's complement; a negative one ends in the pool."""
    half = 2 ** (bits - 1)
    offset = (index * stride + half) % (2 * half) - half
    place: Tensor = torch.div(offset, stride, rounding_mode="floor") % (half // stride + 1)
    return place
