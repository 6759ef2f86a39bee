"""What the memory of this device gives: the ceiling that decode figures are held against, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from validation.bench.clock import Clock, Spread

_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_READINGS = 15


@dataclass(frozen=True)
class Ceiling:
    """Bytes a second of a large copy (read and written) and of a large sum (read)."""

    copy: Spread
    read: Spread

    @property
    def bytes_per_second(self) -> float:
        """The greater of the two medians."""
        return max(self.copy.median, self.read.median)


def measure_ceiling(clock: Clock) -> Ceiling:
    """Copy and read arrays beyond any cache."""
    source = torch.zeros(_BYTES[clock.device.type] // 4, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    clock.seconds(lambda: target.copy_(source))
    clock.seconds(lambda: source.sum())
    copies = [2 * size / clock.seconds(lambda: target.copy_(source)) for _ in range(_READINGS)]
    reads = [size / clock.seconds(lambda: source.sum()) for _ in range(_READINGS)]
    return Ceiling(Spread.of(copies), Spread.of(reads))
