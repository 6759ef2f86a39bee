"""Seeded random tensors that the input families are made of."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from numerics.formats import bf16

GARBAGE = 30000.0
"""Magnitude of what an op must not read: finite, held by BF16, and gross in any result that it leaks into."""


class Draw:
    """A random stream that depends on its label and seed alone, so that one family's cases never shift
    another's. `turn` is the family's place among those of its op; plain numbers take turns with it (`constants`)."""

    def __init__(self, label: str, seed: int, turn: int = 0) -> None:
        self.seed, self.turn = seed, turn
        digest = hashlib.sha256(f"{label}/{seed}".encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def null_rows(self, rows: int) -> list[int]:
        """Rows that belong to nobody: none of one row, a drawn one of two or three, else the last and a drawn one.

        A padded batch ends in such rows; a guard that covers one of them, or the last alone, leaves the other.
        """
        if rows < 4:
            return [self.one(0, rows)] if rows > 1 else []
        return [self.one(0, rows - 1), rows - 1]

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        """float32, normal."""
        return torch.randn(*shape, generator=self.generator) * std + mean

    def bf16(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        """bfloat16, normal before rounding."""
        return bf16(self.normal(*shape, std=std, mean=mean))

    def norm_weight(self, width: int) -> Tensor:
        """bfloat16, about 1 and, in every eighth channel, -1."""
        weight = self.bf16(width, std=0.1, mean=1.0)
        weight[::8] *= -1
        return weight

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """float32, uniform in [low, high)."""
        return torch.rand(*shape, generator=self.generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64, uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def one(self, low: int, high: int) -> int:
        """One integer in [low, high)."""
        return int(self.integers(low, high))

    def bytes(self, *shape: int) -> Tensor:
        """uint8, uniform."""
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)

    def permutation(self, n: int) -> Tensor:
        """int64 [n]."""
        return torch.randperm(n, generator=self.generator)

    def signs(self, *shape: int) -> Tensor:
        """float32, -1 or 1."""
        return self.integers(0, 2, *shape).float() * 2 - 1

    def garbage(self, *shape: int) -> Tensor:
        """bfloat16 of magnitude 0.5 to 1 times `GARBAGE`, either sign."""
        return bf16(self.signs(*shape) * self.uniform(GARBAGE / 2, GARBAGE, *shape))

    def with_subnormals(self, x: Tensor) -> Tensor:
        """x with a quarter of its elements replaced by subnormals of its dtype and an eighth by -0 or 0.

        With two rows or more the last row (first axis) holds nothing else.
        """
        subnormal = (self.signs(*x.shape) * self.uniform(1e-41, 1e-38, *x.shape)).to(x.dtype)
        zero = (self.signs(*x.shape) * 0.0).to(x.dtype)
        chance = self.uniform(0, 1, *x.shape)
        mixed = torch.where(chance < 0.25, subnormal, torch.where(chance < 0.375, zero, x))
        if x.shape[0] > 1:
            mixed[-1] = torch.where(chance[-1] < 0.5, subnormal[-1], zero[-1])
        return mixed

    def cancelling(self, first: Tensor, remainder: float) -> tuple[Tensor, Tensor]:
        """(a, b), BF16, with a like `first` and a + b only about `remainder` times as large."""
        second = first.float() * (-1 + remainder * self.normal(*first.shape))
        return bf16(first), bf16(second)
