"""Choosing the next token: greedy, or seeded sampling with temperature and top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class SamplingError(ValueError):
    """Sampling parameters out of range, or logits that cannot be sampled from."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen. Temperature 0 is greedy; ties then go to the lowest token id."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise SamplingError(f"temperature is {self.temperature}, a finite number >= 0 is needed")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}, allowed is 0 < top_p <= 1")


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The next token from one row of logits, f32 [vocab].

    The random number depends on (seed, position) alone, so a request draws the same numbers alone, in a batch, or after
    being preempted.

    Raises:
        SamplingError: the row holds NaN or infinity; nothing sensible can be drawn from it.
    """
    if not bool(logits.isfinite().all()):
        raise SamplingError(f"logits at position {position} hold NaN or infinity")
    if params.temperature == 0:
        return int(logits.argmax())
    # Measured from the largest, no temperature, however small, can make logits overflow.
    scaled = (logits.double() - logits.max()) / params.temperature
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    cumulative = probabilities.cumsum(-1)
    # The token that crosses top_p is kept, so at least one always is.
    kept = probabilities.masked_fill(cumulative - probabilities >= params.top_p, 0.0)
    threshold = _uniform(params.seed, position) * float(kept.sum())
    drawn = int((kept.cumsum(-1) <= threshold).sum())
    last_kept = int(kept.count_nonzero()) - 1
    return int(order[min(drawn, last_kept)])


def _uniform(seed: int, position: int) -> float:
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position) % 2**63)
    return float(torch.rand((), generator=generator, dtype=torch.float64))
