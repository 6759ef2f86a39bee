"""Kimi delta attention of the generic path: short convolution, gates, the delta rule on an FP32 state, gated norm.

Three forms of the same recurrence: one token for a batch of requests (`kda_step`), a few tokens of each with the state
after every one (`kda_verify`), and many tokens of one request (`kda_sequence`), which works in chunks so that a prompt
costs a few matrix products instead of a loop over tokens. The state is `S[v, k]` per head. All forms write the pools in
place and only at the slots they own; slot 0 is null.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode_impl.config import L2_NORM_EPS, O_NORM_EPS
from decode_impl.generic.linear import projection
from numerics.formats import bf16

CHUNK = 16
"""Tokens per chunk. Bounded by -5, the summed log-decay of 16 tokens stays above -80, inside FP32's exponents."""


class Gates(NamedTuple):
    """What steers the recurrence: `log_decay` f32 [n, h, d] per key channel, `beta` f32 [n, h]."""

    log_decay: Tensor
    beta: Tensor


class Projected(NamedTuple):
    """The parts of a packed projection row, all bf16: `qkv` [n, 3D], `gate` [n, h, d], `f_a` [n, d], `beta` [n, h]."""

    qkv: Tensor
    gate: Tensor
    f_a: Tensor
    beta: Tensor


def split_projection(proj: Tensor, heads: int, head_dim: int) -> Projected:
    """Cut a packed row `q | k | v | g | f_a | beta` (bf16 [n, 4D + d + h]) into its parts."""
    size = heads * head_dim
    qkv, gate, f_a, beta = proj.split([3 * size, size, head_dim, heads], dim=-1)
    return Projected(qkv, gate.unflatten(-1, (heads, head_dim)), f_a, beta)


def convolve(window: Tensor, weight: Tensor) -> Tensor:
    """Four taps, oldest first, then silu, in FP32.

    window: f32 [..., 3D, 4]; weight: f32 [3D, 4]. Returns f32 [..., 3D].
    """
    return torch.nn.functional.silu((window * weight).sum(-1))


def decay_gates(f_a: Tensor, f_b: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Gates:
    """Bounded log-decay per key channel and beta per head, in FP32 from BF16 projections."""
    heads = A_log.numel()
    g = (projection(x=f_a, weight=f_b).float() + dt_bias.float()).unflatten(-1, (heads, -1))
    return Gates(lower_bound * torch.sigmoid(A_log.float().exp()[:, None] * g), torch.sigmoid(beta.float()))


def queries_keys_values(conv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the conv output into heads; q and k become unit vectors and q is scaled by d^-0.5.

    conv: [n, 3D]. Returns q, k, v, each f32 [n, h, d].
    """
    q, k, v = conv.float().unflatten(-1, (3, heads, -1)).unbind(-3)
    q = q * (q.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt() * q.shape[-1] ** -0.5
    k = k * (k.square().sum(-1, keepdim=True) + L2_NORM_EPS).rsqrt()
    return q, k, v


def delta_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> Tensor:
    """One token of the recurrence, updating `S` in place.

    S: f32 [n, h, d(v), d(k)]; q, k, v: f32 [n, h, d]. Returns o, f32 [n, h, d].
    """
    S *= gates.log_decay.exp()[..., None, :]
    u = (v - _read(S, k)) * gates.beta[..., None]
    S.addcmul_(u[..., :, None], k[..., None, :])
    return _read(S, q)


def _read(S: Tensor, x: Tensor) -> Tensor:
    """`S x` per head, f32 [n, h, d]; as a row vector times the transpose, which is far faster on a CPU."""
    return (x[..., None, :] @ S.mT).squeeze(-2)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over a head, weighted and gated by sigmoid(gate). o, gate: [n, h, d]. Returns bf16 [n, h*d]."""
    wide = o.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + O_NORM_EPS).rsqrt() * weight.float()
    return bf16(normed * torch.sigmoid(gate.float())).flatten(-2)


def kda_step(*, slots: Tensor, **inputs: Any) -> Tensor:
    """One token for every row: row i reads and writes slot `slots[i]`.

    proj: bf16 [n, 4D+d+h]; conv_state: bf16 [slots, 3D, 3]; state: f32 or bf16 [slots, h, d, d], both written in place;
    slots: i64 [n]. Returns bf16 [n, D]; rows of slot 0 are zero and write nothing.
    """
    return kda_verify(sources=slots, targets=slots[:, None], **inputs)


def kda_verify(
    *,
    proj: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    sources: Tensor,
    targets: Tensor,
) -> Tensor:
    """`w` consecutive tokens of every request: request i starts from slot `sources[i]`, and what follows its token j is
    written to slot `targets[i, j]`.

    proj: bf16 [n*w, 4D+d+h], request by request; sources: i64 [n]; targets: i64 [n, w]. Otherwise as `kda_step`.
    """
    heads, head_dim = state.shape[1], state.shape[-1]
    width = targets.shape[1]
    y = proj.new_zeros(sources.shape[0], width, heads * head_dim)
    live = sources.nonzero().squeeze(-1)
    if not heads or not live.numel():
        return y.flatten(0, 1)
    rows = proj.view(-1, width, proj.shape[-1])[live]
    parts = split_projection(rows.flatten(0, 1), heads, head_dim)
    history = torch.cat([conv_state[sources[live]], parts.qkv.unflatten(0, (-1, width)).mT], dim=-1)
    windows = history.unfold(-1, conv_weight.shape[-1], 1).transpose(1, 2)  # [n, w, 3D, 4]
    conv = bf16(convolve(windows.flatten(0, 1).float(), conv_weight))
    gates = decay_gates(parts.f_a, f_b, parts.beta, A_log, dt_bias, lower_bound)
    tokens = [x.unflatten(0, (-1, width)) for x in (*queries_keys_values(conv, heads), *gates)]
    S = state.index_select(0, sources[live]).float()
    outputs = []
    for j in range(width):
        q, k, v, log_decay, beta = (x[:, j] for x in tokens)
        outputs.append(delta_rule(S, q, k, v, Gates(log_decay, beta)))
        stored = S.to(state.dtype)
        state.index_copy_(0, targets[live, j], stored)
        conv_state.index_copy_(0, targets[live, j], windows[:, j, :, 1:])
        S = stored.float()
    o = bf16(torch.stack(outputs, 1).flatten(0, 1))
    y[live] = gated_norm(o, parts.gate, norm_weight).unflatten(0, (-1, width))
    return y.flatten(0, 1)


def kda_sequence(
    *,
    proj: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slot: int,
) -> Tensor:
    """T consecutive tokens of the request in `slot`, in chunks of 16. Arguments and contract as in `kda_step`."""
    heads, head_dim = state.shape[1], state.shape[-1]
    if not heads or not slot:
        return proj.new_zeros(proj.shape[0], heads * head_dim)
    parts = split_projection(proj, heads, head_dim)
    taps = conv_weight.shape[-1]
    history = torch.cat([conv_state[slot].T, parts.qkv])
    conv_state[slot] = history[history.shape[0] - taps + 1 :].T
    conv = bf16(convolve(history.float().unfold(0, taps, 1), conv_weight))
    gates = decay_gates(parts.f_a, f_b, parts.beta, A_log, dt_bias, lower_bound)
    o, S = chunked_delta_rule(state[slot].float(), *queries_keys_values(conv, heads), gates)
    state[slot] = S.to(state.dtype)
    return gated_norm(bf16(o), parts.gate, norm_weight)


def chunked_delta_rule(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The recurrence over T tokens, a chunk at a time, equal to the token loop up to FP32 rounding.

    Inside a chunk let G be the running sum of the log-decay. The updates u of all its tokens solve the lower triangular
    system `(I + A) U = beta * (V - (K exp(G)) S^T)` with `A[t, j] = beta_t * sum_d k_t k_j exp(G_t - G_j)` for j < t
    (the WY form of the delta rule, Yang et al. 2024, with a decay per channel). Only decay *differences* are
    exponentiated, so nothing overflows.

    S: f32 [h, d, d]; q, k, v: f32 [T, h, d]. Returns (o f32 [T, h, d], the state after the last token).
    """
    outputs = []
    for start in range(0, q.shape[0], chunk):
        rows = slice(start, start + chunk)
        o, S = _one_chunk(S, q[rows], k[rows], v[rows], Gates(gates.log_decay[rows], gates.beta[rows]))
        outputs.append(o)
    return torch.cat(outputs), S


def _one_chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    tokens = q.shape[0]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    G = gates.log_decay.transpose(0, 1).cumsum(1)
    beta = gates.beta.T[..., None]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    # Above the diagonal the difference is positive and may overflow; those entries are never used.
    decay = (G[:, :, None] - G[:, None]).masked_fill(future[..., None], 0.0).exp()
    A = torch.einsum("htd,hjd,htjd->htj", k, k, decay).tril(-1) * beta
    rhs = beta * (v - (k * G.exp()) @ S.transpose(-1, -2))
    U = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    scores = torch.einsum("htd,hjd,htjd->htj", q, k, decay).tril()
    o = (q * G.exp()) @ S.transpose(-1, -2) + scores @ U
    S = S * G[:, -1].exp()[:, None] + U.transpose(-1, -2) @ (k * decay[:, -1])
    return o.transpose(0, 1), S
