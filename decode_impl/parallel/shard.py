"""How a dimension is divided over tensor-parallel ranks."""

from __future__ import annotations


def share(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """The contiguous range `start, stop` of `total` items that `rank` owns; shares differ by at most one item.

    With fewer items than ranks the last ranks own nothing: a small model at TP 8 or 16 then has ranks without heads.
    """
    base, extra = divmod(total, ranks)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)
