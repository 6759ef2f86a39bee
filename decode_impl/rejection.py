"""Standard rejection sampling of one draft: what is committed follows the target's distribution exactly.

A draft drawn from `q` is accepted with probability min(1, p/q); a rejected one is replaced by a draw from the part of
`p` that `q` does not cover (Leviathan et al. 2023). Only the *same* `q` that the draft was drawn from makes this exact.
"""

from __future__ import annotations

from torch import Tensor

from decode_impl.sampling import draw


def acceptance_probability(p: Tensor, q: Tensor, draft: int) -> float:
    """Chance that `draft` is accepted. p, q: f64 [vocab], target and draft distribution."""
    return min(1.0, float(p[draft] / q[draft])) if q[draft] > 0 else 0.0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draft is replaced from: `max(p - q, 0)`, normalised; `p` where nothing is left. f64 [vocab]."""
    rest = (p - q).clamp_min(0.0)
    total = float(rest.sum())
    return rest / total if total > 0 else p


def accept(p: Tensor, q: Tensor, draft: int, accept_number: float, residual_number: float) -> tuple[int, bool]:
    """The token to commit, and whether it is the draft. The numbers are uniform in [0, 1)."""
    if accept_number < acceptance_probability(p, q, draft):
        return draft, True
    return draw(residual(p, q), residual_number), False
