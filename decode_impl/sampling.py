"""Choosing the next token: greedy, or seeded sampling with temperature and top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

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
        if type(self.seed) is not int:
            raise SamplingError(f"seed is {self.seed!r}, a whole number is needed")


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The next token from one row of logits, f32 [vocab].

    The random number depends on (seed, position) alone, so a request draws the same numbers alone, in a batch, or after
    being preempted.

    Raises:
        SamplingError: the row holds NaN or infinity; nothing sensible can be drawn from it.
    """
    if params.temperature == 0:
        return int(_finite(logits, position).argmax())
    kept, order = _kept(logits, params, position)
    threshold = uniform(params.seed, position, Stream.TOKEN) * float(kept.sum())
    drawn = int((kept.cumsum(-1) <= threshold).sum())
    last_kept = int(kept.count_nonzero()) - 1
    return int(order[min(drawn, last_kept)])


def distribution(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    """What `sample` draws from: probabilities f64 [vocab]; one where greedy would point.

    Raises:
        SamplingError: the row holds NaN or infinity.
    """
    probabilities = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
    if params.temperature == 0:
        probabilities[_finite(logits, position).argmax()] = 1.0
        return probabilities
    kept, order = _kept(logits, params, position)
    probabilities[order] = kept / kept.sum()
    return probabilities


def draw(probabilities: Tensor, number: float) -> int:
    """The token at `number` in [0, 1) of the cumulated probabilities f64 [vocab]; never one of probability zero."""
    possible = probabilities.nonzero().squeeze(-1)
    cumulative = probabilities[possible].cumsum(-1)
    index = int((cumulative <= number * float(cumulative[-1])).sum())
    return int(possible[min(index, len(possible) - 1)])


class Stream(IntEnum):
    """What a random number is for: numbers of different streams are independent at the same seed and position."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def uniform(seed: int, position: int, stream: Stream) -> float:
    """A number in [0, 1) that depends on its arguments alone.

    A hash, not a generator: torch's CPU generator keeps 32 bits of a seed, in which streams would meet.
    """
    digest = blake2b(f"{seed}/{position}/{stream}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _finite(logits: Tensor, position: int) -> Tensor:
    if not bool(logits.isfinite().all()):
        raise SamplingError(f"logits at position {position} hold NaN or infinity")
    return logits


def _kept(logits: Tensor, params: SamplingParams, position: int) -> tuple[Tensor, Tensor]:
    """Tempered probabilities f64 [vocab] by falling size, zero behind top_p, and their token ids."""
    # Measured from the largest, no temperature, however small, can make logits overflow.
    scaled = (_finite(logits, position).double() - logits.max()) / params.temperature
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    cumulative = probabilities.cumsum(-1)
    # The token that crosses top_p is kept, so at least one always is.
    return probabilities.masked_fill(cumulative - probabilities >= params.top_p, 0.0), order
