"""Mail without flags: no payload is the sentinel, and none is changed but for the sign of zero. Checked in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode_impl.parallel.programs import Parts
from decode_impl.parallel.protocol import SENTINEL
from numerics.formats import bf16

_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Low halves of FP32 words: exact BF16 values, and the neighbours of what rounding turns on."""

_UNDERFLOW = 0x8001
"""The first this many negative FP32 values, -0 and the subnormals behind it, all of which round to -0 or next to it."""


def checked(p: Parts) -> dict[str, Any]:
    """Send every BF16 bit pattern, and FP32 values around each of them, as either half of a word of mail."""
    values = _values()
    zero = torch.zeros_like(values)
    pairs = torch.cat([torch.stack(halves, 1) for halves in ((values, zero), (zero, values), (values, values))])
    words = p["mail_words"](p, pairs)
    taken = pairs[words == SENTINEL]
    lost = pairs[~p["has_arrived"](words)]
    changed = pairs[_changed(words, pairs)]
    return {
        "checked": len(pairs),
        "sentinels": len(taken),
        "lost": len(lost),
        "changed": len(changed),
        "example": _shown(taken if len(taken) else changed),
    }


def _values() -> Tensor:
    halves = torch.arange(2**16, dtype=torch.int64) << 16
    around = [halves + low for low in _LOW_HALVES]
    tiny = torch.arange(_UNDERFLOW, dtype=torch.int64) + 0x8000_0000
    words = torch.cat([*around, tiny])
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.view(torch.float32)


def _changed(words: Tensor, pairs: Tensor) -> Tensor:
    """Where a word of mail is not the two values rounded to BF16, up to the sign of zero."""
    right = bf16(pairs).view(torch.int16).long() & 0xFFFF
    right = torch.where(right == 0x8000, torch.zeros_like(right), right)
    return (words & 0xFFFF != right[:, 0]) | (words >> 16 != right[:, 1])


def _shown(pairs: Tensor) -> str:
    if not len(pairs):
        return ""
    first = pairs[0].view(torch.int32)
    return " and ".join(f"{pairs[0, half].item():g} (0x{int(first[half]) & 0xFFFFFFFF:08x})" for half in (0, 1))
