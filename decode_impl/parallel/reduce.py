"""Orders in which ranks' partial sums are added: a fixed order makes ranks, and reruns, agree bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_THREAD_GROUPS = 4


def sequential_sum(partials: Sequence[Tensor]) -> Tensor:
    """r0 + r1 + ... in FP32, ascending ranks: the two-shot order, and the generic path's. Returns f32, same shape."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total


def grouped_sum(partials: Sequence[Tensor]) -> Tensor:
    """The one-shot order: four groups of consecutive ranks are summed, then the groups, all in FP32.

    With eight ranks: (((r0+r1) + (r2+r3)) + (r4+r5)) + (r6+r7). Returns f32, same shape.
    """
    per_group = -(-len(partials) // _THREAD_GROUPS)
    groups = [partials[i : i + per_group] for i in range(0, len(partials), per_group)]
    return sequential_sum([sequential_sum(group) for group in groups])
