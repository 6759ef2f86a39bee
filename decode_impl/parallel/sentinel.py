"""FP32 values as words of mail without flags: rounded to BF16 first, and only then freed of -0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode_impl.parallel.programs import Parts

if TYPE_CHECKING:
    from torch import Tensor


def mail_words(p: Parts, values: Tensor) -> Tensor:
    """Pairs of FP32 values, f32 [n, 2], as they are sent: int64 [n], the first value of a pair in the low half."""
    # Rank processes of the sync gate need the table of programs and not torch, which takes seconds to import.
    import torch

    from numerics.formats import bf16

    halves = p["sendable"](bf16(values).view(torch.int16).long() & 0xFFFF)
    words: Tensor = halves[:, 0] + halves[:, 1] * 0x1_0000
    return words
