"""The MLA value back: `y = bf(bf(latent @ w_uv) * sigmoid(gate))`, one launch.

- latent: bf16 [n, h, C], rows and heads at any stride; w_uv: bf16 [h, C, v]; gate: bf16 [n, h*v], rows at any stride.
- y: bf16 [n, h*v], fully written.
- Rounded to BF16: the value, and y. K = C is summed in blocks, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.specialized.contract import batch_bin
from decode_impl.specialized.kernels.common import bf16, dot, f32, padded_rows, sigmoid


@triton.jit
def mla_value_kernel(
    latent_ptr,
    w_uv_ptr,
    gate_ptr,
    y_ptr,
    rows,
    heads,
    latent_stride,
    head_stride,
    gate_stride,
    value,
    KV_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (heads, tiles of the value head)."""
    head = tl.program_id(0)
    row, c, v = tl.arange(0, ROWS), tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    own = tl.minimum(row, rows - 1).to(tl.int64)
    latent = latent_ptr + own[:, None] * latent_stride + head * head_stride + c[None, :]
    w_uv = w_uv_ptr + (head * KV_RANK + c)[:, None] * value + v[None, :]
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for start in tl.range(0, KV_RANK, BLOCK_C, num_stages=3):
        inside = start + c < KV_RANK
        x = tl.load(latent + start, mask=inside[None, :], other=0.0)
        w = tl.load(w_uv + start * value, mask=inside[:, None] & (v[None, :] < value), other=0.0)
        acc = dot(x, w, acc)
    inside = (row[:, None] < rows) & (v[None, :] < value)
    gate = f32(tl.load(gate_ptr + own[:, None] * gate_stride + head * value + v[None, :], mask=inside, other=0.0))
    y = bf16(f32(bf16(acc)) * sigmoid(gate))
    tl.store(y_ptr + (row.to(tl.int64) * heads + head)[:, None] * value + v[None, :], y, mask=inside)


def mla_value(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
    """Value heads from the latent, gated: bf16 [n, h*v]. Contract: module docstring."""
    rows, heads, kv_rank = latent.shape
    value = w_uv.shape[-1]
    y = torch.empty(rows, heads * value, dtype=torch.bfloat16, device=latent.device)
    block_v = min(32, triton.next_power_of_2(value))
    mla_value_kernel[heads, triton.cdiv(value, block_v)](
        latent,
        w_uv,
        gate,
        y,
        rows,
        heads,
        latent.stride(0),
        latent.stride(1),
        gate.stride(0),
        value,
        KV_RANK=kv_rank,
        ROWS=padded_rows(batch_bin(rows)),
        BLOCK_C=min(128, max(16, triton.next_power_of_2(kv_rank))),
        BLOCK_V=block_v,
        num_warps=4,
    )
    return y
