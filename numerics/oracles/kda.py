"""FP64 oracles of Kimi delta attention: one token per request, or many tokens of one request.

Notation of the gated delta rule with a decay per key channel: state S [d(v), d(k)] per head,
    S <- S Diag(exp l);  u = beta (v - S k);  S <- S + u k^T;  o = S q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.oracles.case import Case, Outputs, pool
from numerics.oracles.linear import linear, rms

L2_EPS = 1e-6
O_NORM_EPS = 1e-5
"""Constants under the roots of the key norm and of the output norm: part of the op, not of the checkpoint."""


@dataclass(frozen=True)
class Token:
    """What one token brings to the recurrence: q, k, v, l (log decay) [..., h, d]; beta [..., h]; g [...,
    h, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    l: Tensor
    beta: Tensor
    g: Tensor


def kda_step(case: Case) -> Outputs:
    """One token for each of n requests. Returns y [n, D] and the whole pools conv_state and state after
    the step.

    Row i reads and writes slot slots[i]; a row with slot 0 gives 0 and touches nothing, whatever its
    inputs hold.
    """
    conv_state, state = pool(case["conv_state"]), pool(case["state"])
    live = case["slots"] > 0
    slots, proj = case["slots"][live], case["proj"][live].double()
    window = torch.cat([conv_state[slots], proj[:, : conv_state.shape[1], None]], dim=-1)
    t = prepare(case, proj, window)
    S, o = delta_rule(state[slots], t)
    conv_state[slots], state[slots] = window[..., 1:], S
    y = torch.zeros(case["slots"].shape[0], o.shape[-2] * o.shape[-1], dtype=torch.float64, device=proj.device)
    y[live] = gated_norm(o, t.g, case["norm_weight"])
    return {"y": y, "conv_state": conv_state, "state": state}


def kda_verify(case: Case) -> Outputs:
    """w consecutive tokens of each of n requests. Returns y [n*w, D] and the whole pools after the last token.

    Request i starts from slot sources[i]; conv window and state after its token j go to slot targets[i, j].
    A request with source 0 gives 0 and touches nothing.
    """
    conv_state, state = pool(case["conv_state"]), pool(case["state"])
    requests, width = case["targets"].shape
    live = case["sources"] > 0
    sources, targets = case["sources"][live], case["targets"][live]
    proj = case["proj"].double().view(requests, width, -1)[live]
    window, S = conv_state[sources], state[sources]
    y = torch.zeros(requests, width, conv_state.shape[1] // 3, dtype=torch.float64, device=proj.device)
    for j in range(width):
        window = torch.cat([window[..., -3:], proj[:, j, : conv_state.shape[1], None]], dim=-1)
        t = prepare(case, proj[:, j], window)
        S, o = delta_rule(S, t)
        conv_state[targets[:, j]], state[targets[:, j]] = window[..., 1:], S
        y[live, j] = gated_norm(o, t.g, case["norm_weight"])
    return {"y": y.flatten(0, 1), "conv_state": conv_state, "state": state}


def kda_sequence(case: Case) -> Outputs:
    """T consecutive tokens of the request in `slot`, one by one. Returns y [T, D] and the whole pools
    after them."""
    conv_state, state, slot = pool(case["conv_state"]), pool(case["state"]), case["slot"]
    proj = case["proj"].double()
    tokens, width = proj.shape[0], conv_state.shape[1]
    if slot <= 0:
        y = torch.zeros(tokens, width // 3, dtype=torch.float64, device=proj.device)
        return {"y": y, "conv_state": conv_state, "state": state}
    history = torch.cat([conv_state[slot].T, proj[:, :width]])
    t = prepare(case, proj, history.unfold(0, 4, 1))
    S, rows = state[slot], []
    for i in range(tokens):
        S, o = delta_rule(S, Token(t.q[i], t.k[i], t.v[i], t.l[i], t.beta[i], t.g[i]))
        rows.append(o)
    conv_state[slot], state[slot] = history[-3:].T, S
    y = gated_norm(torch.stack(rows), t.g, case["norm_weight"])
    return {"y": y, "conv_state": conv_state, "state": state}


def prepare(case: Case, proj: Tensor, window: Tensor) -> Token:
    """Split projections [n, 4D+d+h] and turn conv windows [n, 3D, 4] (oldest first) into q, k, v and
    gates."""
    n, h, d = proj.shape[0], case["A_log"].numel(), case["norm_weight"].numel()
    D = h * d
    g, f_a, beta = proj[:, 3 * D : 4 * D], proj[:, 4 * D : 4 * D + d], proj[:, 4 * D + d :]
    conv = torch.nn.functional.silu((window * case["conv_weight"].double()).sum(-1))
    q, k, v = conv.view(n, 3, h, d).unbind(1)
    g1 = linear(f_a, case["f_b"]) + case["dt_bias"].double()
    A = case["A_log"].double().exp()[:, None]
    l = case["lower_bound"] * torch.sigmoid(A * g1.view(n, h, d))
    return Token(_unit(q) * d**-0.5, _unit(k), v, l, beta.sigmoid(), g.reshape(n, h, d))


def delta_rule(S: Tensor, t: Token) -> tuple[Tensor, Tensor]:
    """One token of the recurrence. S [..., h, d(v), d(k)]; returns the new S and o [..., h, d(v)]."""
    S = S * t.l.exp()[..., None, :]
    u = t.beta[..., None] * (t.v - torch.einsum("...vk,...k->...v", S, t.k))
    S = S + u[..., :, None] * t.k[..., None, :]
    return S, torch.einsum("...vk,...k->...v", S, t.q)


def gated_norm(o: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """o / rms(o) * weight * sigmoid(g) per head. o, g [n, h, d]; returns [n, h*d]."""
    return (rms(o, O_NORM_EPS) * weight.double() * g.sigmoid()).flatten(-2)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
