"""FP64 oracles of the plain linear ops: projection, RMSNorm and all-reduce."""

from __future__ import annotations

from torch import Tensor

from numerics.oracles.case import Case, Outputs, numbered


def projection(case: Case) -> Outputs:
    """y = x W^T. x [n, K], weight [N, K]; y [n, N]."""
    return {"y": linear(case["x"], case["weight"])}


def rms_norm(case: Case) -> Outputs:
    """y = x / sqrt(mean(x^2) + eps) * weight. x [n, H]; y [n, H]."""
    return {"y": rms(case["x"], case["eps"]) * case["weight"].double()}


def all_reduce(case: Case) -> Outputs:
    """y = sum over ranks of y.r. y.r [n, H]; y [n, H]."""
    return {"y": total(numbered(case, "y"))}


def linear(x: Tensor, W: Tensor) -> Tensor:
    """x W^T in float64. x [..., K], W [N, K]; returns [..., N]."""
    return x.double() @ W.double().T


def rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last axis, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def total(parts: list[Tensor]) -> Tensor:
    """Sum of the ranks' tensors in float64."""
    result = parts[0].double()
    for part in parts[1:]:
        result = result + part.double()
    return result
