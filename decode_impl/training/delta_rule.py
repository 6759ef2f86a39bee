"""The gated delta rule of KDA in chunked (WY) form, with gradients: FP32 throughout, any length, no custom kernels.

Letters as in docs/ops.md: per head, `S <- S*exp(l)`, `u = (v - S k)*beta`, `S <- S + u (x) k`, `o = S q`.
Inside a chunk the u solve a unit lower-triangular system; between chunks only the state [k, v] is carried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""Tokens per chunk. Decays are taken relative to the chunk's middle: at the bound of -5 a factor stays within
exp(+-80), inside FP32."""


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Outputs of one sequence per row, from a zero state.

    q, k (normalised and scaled), v, log_decay: f32 [B,T,h,d]; beta: f32 [B,T,h]; T a multiple of `chunk`, which
    is a power of two of at most 32. Returns o f32 [B,T,h,d].
    """
    batch, length, heads, dim = q.shape
    if length % chunk or chunk > CHUNK or chunk & (chunk - 1):
        raise ValueError(f"delta rule: chunk {chunk}, allowed are powers of two up to {CHUNK} that divide {length}")
    k_down, k_up, q_down, q_start, beta_v, beta_k, k_end, decay = decay_factors(q, k, v, log_decay, beta, chunk)
    rows = torch.arange(chunk, device=q.device)
    inverse = unit_lower_inverse((k_down @ k_up.mT).masked_fill(rows[:, None] <= rows, 0))
    u, states = _Scan.apply(inverse @ beta_v, inverse @ beta_k, k_end, decay)  # type: ignore[no-untyped-call]
    o = q_start @ states + (q_down @ k_up.mT).masked_fill(rows[:, None] < rows, 0) @ u
    tokens_first = o.view(-1, batch, heads, chunk, dim).permute(1, 0, 3, 2, 4)
    back: Tensor = tokens_first.reshape(batch, length, heads, dim)
    return back


def decay_factors(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every element-wise product of the chunked form, as [chunks, B*h, chunk, d].

    `down` decays from the chunk's middle to a row, `up` back to it, `start` from the chunk's start, `end` to its
    end. Returns beta*k*down, k*up, q*down, q*start, beta*v, beta*k*start, k*end and the chunk's decay [.., d, 1].
    """
    batch, length, heads, dim = q.shape
    shape = (batch, length // chunk, chunk, heads, dim)
    q, k, v, log_decay = (x.view(shape).permute(1, 0, 3, 2, 4).flatten(1, 2) for x in (q, k, v, log_decay))
    beta = beta.view(shape[:-1]).permute(1, 0, 3, 2).flatten(1, 2).unsqueeze(-1)
    total = log_decay.cumsum(2)
    middle, end = total[:, :, chunk // 2 - 1 : chunk // 2], total[:, :, -1:]
    down, up, start = (total - middle).exp(), (middle - total).exp(), total.exp()
    beta_k = beta * k
    return (
        beta_k * down,
        k * up,
        q * down,
        q * start,
        beta * v,
        beta_k * start,
        k * (end - total).exp(),
        end.exp().mT,
    )


def unit_lower_inverse(below: Tensor) -> Tensor:
    """Inverse of I + `below`, strictly lower triangular [..., C, C], C a power of two; gradients in two products."""
    result: Tensor = _UnitLowerInverse.apply(below)  # type: ignore[no-untyped-call]
    return result


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Tensor) -> Tensor:
        size = below.shape[-1]
        rows = torch.arange(size, device=below.device)
        inverse = torch.eye(size, dtype=below.dtype, device=below.device).expand_as(below)
        step = 1
        while step < size:
            # Join diagonal blocks pairwise: the block under the diagonal of each pair becomes -C^-1 B A^-1.
            pair = (rows[:, None] // step == rows // step + 1) & (rows // step % 2 == 0)
            inverse = inverse - inverse @ (below * pair) @ inverse
            step *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        gradient: Tensor = -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)
        return gradient


class _Scan(torch.autograd.Function):
    """The recurrence over chunks: `u_c = fresh_c - carried_c S_c`, `S_{c+1} = decay_c * S_c + key_c^T u_c`, S_0 = 0.

    fresh [N,M,C,v], carried and key [N,M,C,k], decay [N,M,k,1]; returns u [N,M,C,v] and the state before each chunk
    [N,M,k,v]. Only what depends on the previous chunk is inside the loops; the other gradients are single products.
    """

    @staticmethod
    def forward(ctx: Any, fresh: Tensor, carried: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        chunks, rows, _, width = fresh.shape
        u = torch.empty_like(fresh)
        states = fresh.new_zeros(chunks, rows, key.shape[-1], width)
        for c in range(chunks):
            torch.baddbmm(fresh[c], carried[c], states[c], alpha=-1, out=u[c])
            if c + 1 < chunks:
                torch.mul(states[c], decay[c], out=states[c + 1])
                states[c + 1].baddbmm_(key[c].mT, u[c])
        ctx.save_for_backward(carried, key, decay, u, states)
        return u, states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        carried, key, decay, u, states = ctx.saved_tensors
        d_u, d_state = grads[0].contiguous().clone(), grads[1].contiguous().clone()
        d_next = torch.zeros_like(d_state)  # gradient of the state after chunk c
        for c in reversed(range(u.shape[0])):
            d_u[c].baddbmm_(key[c], d_next[c])
            d_state[c].baddbmm_(carried[c].mT, d_u[c], alpha=-1)
            if c:
                torch.addcmul(d_state[c], decay[c], d_next[c], out=d_next[c - 1])
        d_decay = (states * d_next).sum(-1, keepdim=True)
        return d_u, -(d_u @ states.mT), u @ d_next.mT, d_decay
