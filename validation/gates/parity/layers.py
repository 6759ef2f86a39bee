"""Where along the layers two arms part: relative differences of what passes between layers, beside the floor's.

The curve explains a cell and decides nothing: `decodegate bisect layers` judges it, over many more tests than a gate
can afford.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RESOLUTION = 2.0**-9
"""Relative difference added before a logarithm: half a ULP of BF16, as for caches."""

_FAR = 2.0**100
"""Stands for a difference that is not finite: far out, and small enough to take a mean of its logarithm."""

Boundaries = Mapping[str, Tensor]


def relative_differences(reference: Boundaries, other: Boundaries) -> Tensor:
    """Relative RMS difference from the reference, f64 [boundaries, sequences], of tensors [sequences, H]."""
    squares = torch.stack([(other[name].double() - x.double()).square().mean(-1) for name, x in reference.items()])
    sizes = torch.stack([x.double().square().mean(-1) for x in reference.values()])
    relative = torch.where(squares == 0, 0.0, squares / sizes).sqrt()
    return torch.where(relative.isfinite(), relative, _FAR)


@dataclass
class LayerCurve:
    """Logarithms of one arm's differences, summed over tokens; `typical` is their geometric mean by boundary."""

    names: list[str] = field(default_factory=list)
    tokens: int = 0
    _logs: Tensor | None = None

    def add(self, reference: Boundaries, other: Boundaries) -> None:
        """Add a step; one without boundaries adds nothing."""
        if not reference:
            return
        logs = (relative_differences(reference, other) + RESOLUTION).log()
        self.names = list(reference)
        self.tokens += logs.shape[1]
        self._logs = logs.sum(1) if self._logs is None else self._logs + logs.sum(1)

    def typical(self) -> list[float]:
        """Geometric mean over tokens, by boundary in the order of a step."""
        return [] if self._logs is None else (self._logs / self.tokens).exp().tolist()


def curves(candidate: LayerCurve, floor: LayerCurve) -> dict[str, Any]:
    """Both curves as plain JSON; empty where the arms do not tell what passes between their layers."""
    if not candidate.names:
        return {}
    return {
        "boundaries": candidate.names,
        "tokens": candidate.tokens,
        "candidate": candidate.typical(),
        "floor": floor.typical(),
    }
