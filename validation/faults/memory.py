"""What a kernel reads when it computes an address wrongly."""

from __future__ import annotations

import torch
from torch import Tensor


def as_if_dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes the row stride of a 2-D `x` for its width."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def wrapped(index: Tensor, stride: int) -> Tensor:
    """The index that `index * stride` leads to when it is computed in 32 bits (two's complement, then 2^32 later)."""
    offset = (index * stride + 2**31) % 2**32 - 2**31
    return torch.div(offset, stride, rounding_mode="floor") % (2**31 // stride + 1)
