"""FP64 oracles of the latent mixture of experts: front, router, MXFP4 experts, shared expert, tail."""

from __future__ import annotations

import torch
from torch import Tensor

from numerics.formats import mxfp4_dequantise
from numerics.oracles.case import Case, Outputs, numbered
from numerics.oracles.linear import linear, rms, total

SUM_EPS = 1e-20
"""Added to the sum of the chosen scores before dividing by it."""


def moe_front(case: Case) -> Outputs:
    """logits = x W_gate^T [n, E]; z = x W_down^T [n, L]."""
    return {"logits": linear(case["x"], case["gate_weight"]), "z": linear(case["x"], case["down_weight"])}


def route(case: Case) -> Outputs:
    """ids [n, k] (int64): the k largest of sigmoid(logits) + bias in FP64, falling, ties to the lower id.

    weights [n, k] = s / (sum of the chosen s + 1e-20) * scaling with s = sigmoid(logits), without the
    bias. Scores that tie in FP32 need not tie here: judge ids with `numerics.oracles.routing`, not by
    equality.
    """
    s = case["logits"].double().sigmoid()
    biased = s + case["bias"].double()
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, : case["top_k"]]
    return {"ids": ids, "weights": route_weights(s, ids, case["scaling"])}


def route_weights(s: Tensor, ids: Tensor, scaling: float) -> Tensor:
    """Unbiased scores s [n, E] of the chosen ids [n, k], normalised to the sum `scaling`."""
    chosen = s.gather(-1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + SUM_EPS) * scaling


def experts(case: Case) -> Outputs:
    """latent = sum over slots of w W2_e situ(W13_e z), W dequantised from MXFP4 exactly. latent [n, L]."""
    z, ids, w = case["z"].double(), case["ids"], case["weights"].double()
    if bool((ids < 0).any()):
        raise IndexError("expert ids start at 0; a negative one would pick an expert from the end")
    latent = torch.zeros_like(z)
    for e in ids.unique().tolist():
        n, slot = (ids == e).nonzero(as_tuple=True)
        W13 = mxfp4_dequantise(case["w13_packed"][e], case["w13_scale"][e], torch.float64)
        W2 = mxfp4_dequantise(case["w2_packed"][e], case["w2_scale"][e], torch.float64)
        # Columns beyond the expert's own width are padding.
        y = gated_mlp(z[n], W13, W2[:, : W13.shape[0] // 2], case["beta"], case["linear_beta"])
        latent.index_add_(0, n, w[n, slot, None] * y)
    return {"latent": latent}


def shared_expert(case: Case) -> Outputs:
    """partial = W_down situ(W_gate_up x). x [n, H]; gate_up [2I, H], gate first; down [H, I]; partial [n,
    H]."""
    return {"partial": gated_mlp(case["x"], case["gate_up"], case["down"], case["beta"], case["linear_beta"])}


def moe_tail(case: Case) -> Outputs:
    """delta = W_up (rms(sum of latent.r) * norm_weight) + sum of shared.r. latent.r [n, L]; delta [n, H]."""
    r = rms(total(numbered(case, "latent")), case["eps"]) * case["norm_weight"].double()
    return {"delta": linear(r, case["up_weight"]) + total(numbered(case, "shared"))}


def gated_mlp(x: Tensor, W13: Tensor, W2: Tensor, beta: float, linear_beta: float) -> Tensor:
    """W2 situ(g, u) with [g | u] = W13 x. x [n, K]; W13 [2I, K]; W2 [N, I]; returns [n, N]."""
    g, u = linear(x, W13).chunk(2, dim=-1)
    return linear(situ(g, u, beta, linear_beta), W2)


def situ(g: Tensor, u: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)."""
    return beta * (g / beta).tanh() * g.sigmoid() * linear_beta * (u / linear_beta).tanh()
