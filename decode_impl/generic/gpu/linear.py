"""Products through cuBLAS in BF16, and the small kernels between them: RMSNorm, SiTU, the router's and the tail's ops.

- Every product sums in FP32 and rounds once, as the plain ops do; cuBLAS may not round partial sums (`exact_products`).
- rms_norm: x bf16 [n, H], rows at any stride; one CTA a row. situ: gate and up side by side, bf16 or f32 [n, 2I].
- Off CUDA, where the kernels run under Triton's interpreter, products are the plain path's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_impl.generic import linear
from decode_impl.generic.attn_res import all_reduce
from decode_impl.specialized.kernels.common import aligned, bf16, f32, situ


def exact_products() -> None:
    """Forbid cuBLAS to add the parts of a split sum in BF16, which would round them; holds for this process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def projection(*, x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer. x: bf16 [n, K]; weight: bf16 [N, K]. Returns bf16 [n, N]."""
    return torch.nn.functional.linear(x, weight) if x.is_cuda else linear.projection(x=x, weight=weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The same, not rounded. Returns f32 [n, N]."""
    return torch.mm(x, weight.T, out_dtype=torch.float32) if x.is_cuda else linear.product(x, weight)


def batched(x: Tensor, weight: Tensor) -> Tensor:
    """One product per head. x: bf16 [n, h, K]; weight: bf16 [h, K, N]. Returns bf16 [h, n, N]."""
    heads = x.transpose(0, 1)
    if x.is_cuda:
        return torch.bmm(heads, weight)
    return torch.bmm(heads.float(), weight.float()).bfloat16()


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, eps, x_stride, width, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    x = f32(tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0))
    weight = f32(tl.load(weight_ptr + i, mask=inside, other=0.0))
    y = x * tl.rsqrt(tl.sum(x * x) / width + eps) * weight
    tl.store(y_ptr + row * width + i, bf16(y), mask=inside)


def rms_norm(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in FP32 with a single cast at the end, bf16 [n, H]."""
    x = aligned(x)
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 256))
        rms_norm_kernel[rows,](x, weight, y, eps, x.stride(0), width, BLOCK=block, num_warps=warps)
    return y


@triton.jit
def situ_kernel(x_ptr, y_ptr, beta, linear_beta, width, BLOCK: tl.constexpr):
    """Grid (rows, tiles of I)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = f32(tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0))
    up = f32(tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0))
    tl.store(y_ptr + row * width + i, bf16(situ(gate, up, beta, linear_beta)), mask=inside)


def activated(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of contiguous gate and up, [n, 2I] bf16 or f32. Returns bf16 [n, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = torch.empty(rows, width, dtype=torch.bfloat16, device=gate_up.device)
    if hidden.numel():
        block = min(1024, triton.next_power_of_2(width))
        situ_kernel[rows, triton.cdiv(width, block)](gate_up, hidden, beta, linear_beta, width, BLOCK=block)
    return hidden


def shared_expert(*, x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    """This rank's share of the shared expert (or of the dense MLP). Returns the partial, bf16 [n, H]."""
    return projection(x=activated(projection(x=x, weight=gate_up), beta, linear_beta), weight=down)


def moe_front(*, x: Tensor, gate_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits (f32 [n, E], never rounded) and the latent input of the experts (bf16 [n, L])."""
    return product(x, gate_weight), projection(x=x, weight=down_weight)


def moe_tail(
    *, latent: Sequence[Tensor], shared: Sequence[Tensor], norm_weight: Tensor, up_weight: Tensor, eps: float
) -> Tensor:
    """All-reduce the latent, normalise, project up, and add the all-reduced shared expert. Returns bf16 [n, H]."""
    routed = projection(x=rms_norm(x=reduced(latent), weight=norm_weight, eps=eps), weight=up_weight)
    return routed + reduced(shared)


def reduced(y: Sequence[Tensor]) -> Tensor:
    """Sum over ranks, bf16 [n, H]; one rank's partial is the sum."""
    return y[0] if len(y) == 1 else all_reduce(y=y)
