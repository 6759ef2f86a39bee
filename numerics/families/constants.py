"""Plain numbers among an op's inputs. They change from case to case, since a kernel may have one of them compiled in.

The first of each is K3's. A number takes another value at the next row count, seed or family, so that any two
neighbouring row counts of one family, and neighbouring families at one row count, have two different ones: whichever is
compiled in, into all kernels or into the one of a batch bin, one of the two cases is wrong.
"""

from __future__ import annotations

from typing import TypeVar

from numerics.families.draw import Draw

T = TypeVar("T")

EPS = (1e-5, 1e-2, 3e-2)
"""Two that no model has: beside rows of a size of about 1 they show in BF16, in any family, where 1e-6 does not."""
LOWER_BOUND = (-5.0, -5.6, -6.2)
BETA = (4.0, 2.5, 6.0)
LINEAR_BETA = (25.0, 3.0, 5.0)
"""Two that inputs of a size of about 1 tell from K3's, in any family."""
SCALING = (1.0, 2.5, 1.7)
SCALES = ((0.83, 0.7), (0.71, 0.59), (0.57, 0.41))
"""Scales of an FP8 query and of an FP8 cache. None is 1 or a power of two, where applying one twice is invisible."""
TEMPER = (1.0, 1.25, 0.8)
"""Factor on the softmax scale that a head's width gives, as models with stretched positions have one."""


def turned(draw: Draw, rows: int, values: tuple[T, ...]) -> T:
    """The value whose turn it is at this row count and seed, in this family."""
    return values[(rows - 1 + draw.seed + draw.turn) % len(values)]
