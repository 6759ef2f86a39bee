"""FP32 values as words of mail without flags: rounded to BF16 first, and only then freed of -0."""

from __future__ import annotations

import torch
from torch import Tensor

from decode_impl.parallel.programs import Parts
from numerics.formats import bf16


def mail_words(p: Parts, values: Tensor) -> Tensor:
    """Pairs of FP32 values, f32 [n, 2], as they are sent: int64 [n], the first value of a pair in the low half."""
    halves = p["sendable"](bf16(values).view(torch.int16).long() & 0xFFFF)
    words: Tensor = halves[:, 0] + halves[:, 1] * 0x1_0000
    return words
