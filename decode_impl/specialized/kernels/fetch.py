"""Asking for weights into L2: no result, no register that waits, a few instructions for the whole range.

A thread asks for `PIECE` bytes at a time (`cp.async.bulk.prefetch`, SM90). It is a hint, on which only time depends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.kernels.common import INTERPRETED

PIECE, THREADS = 4096, 128


@triton.jit
def fetch_kernel(start, pieces, PIECE: tl.constexpr, THREADS: tl.constexpr):
    """Grid (ceil(pieces / THREADS),); `start` points at bytes."""
    piece = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    # Behind the range the last piece is asked for again, which costs nothing.
    address = start + tl.minimum(piece, pieces - 1).to(tl.int64) * PIECE
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .u64 a; cvta.to.global.u64 a, $1; cp.async.bulk.prefetch.L2.global [a], 4096; mov.u32 $0, 0; }",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def fetch_into_l2(weight: Tensor, most: int) -> int:
    """Ask for the first `most` bytes of a weight, in whole pieces; returns how many were asked for."""
    pieces = min(weight.numel() * weight.element_size(), most) // PIECE
    # A row view of a larger tensor may begin off the 16 bytes that the instruction needs.
    if pieces <= 0 or not weight.is_contiguous() or weight.data_ptr() % 16:
        return 0
    fetch_kernel[triton.cdiv(pieces, THREADS),](
        weight.view(-1).view(torch.uint8), pieces, PIECE=PIECE, THREADS=THREADS, num_warps=THREADS // 32
    )
    return pieces * PIECE
