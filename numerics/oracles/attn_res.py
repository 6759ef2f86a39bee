"""FP64 oracles of attention residuals: a softmax over earlier residual blocks and the running prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from numerics.oracles.case import Case, Outputs, numbered
from numerics.oracles.linear import linear, rms, total


def attn_res(case: Case) -> Outputs:
    """prefix p = prefix + delta; mixed = sum_s w_s src_s, normalised, over the first num_blocks blocks and p.

    prefix, delta? [n, H]; blocks [n, NB, H], of which only the first num_blocks are read. Returns prefix and
    mixed, [n, H], neither rounded: mixed is computed from the unrounded p.
    """
    p = case["prefix"].double()
    if case.get("delta") is not None:
        p = p + case["delta"].double()
    return _mix(p, case)


def output_mix(case: Case) -> Outputs:
    """a = sum of y_r W_r^T starts a new prefix (replace_prefix) or is added to it; then as `attn_res`.

    y.r [n, K_r]; weight.r [H, K_r]. Returns prefix and mixed, [n, H], from the unrounded a.
    """
    a = total([linear(y, W) for y, W in zip(numbered(case, "y"), numbered(case, "weight"), strict=True)])
    return _mix(a if case["replace_prefix"] else case["prefix"].double() + a, case)


def _mix(p: Tensor, case: Case) -> Outputs:
    eps = case["eps"]
    src = torch.cat([case["blocks"][:, : case["num_blocks"]].double(), p[:, None]], dim=1)
    query = case["norm_weight"].double() * case["query_weight"].double()
    l = (rms(src, eps) * query).sum(-1)
    mix = (l.softmax(-1)[..., None] * src).sum(1)
    out_norm_weight = case.get("out_norm_weight")
    mixed = mix if out_norm_weight is None else rms(mix, eps) * out_norm_weight.double()
    return {"prefix": p, "mixed": mixed}
