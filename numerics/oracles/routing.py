"""Is a chosen expert set *a* correct one? Judged in FP64, with ties as ties, apart from any
implementation's order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.bounds import F32
from numerics.oracles.moe import route_weights


@dataclass(frozen=True)
class RouteJudgement:
    """Verdict on the router's rows. Per-row tensors are [rows], in row order; a NaN row is not judged.

    `violation_ulps` measures how wrong a set is: the best score left out minus the worst score taken, in
    FP32 ULPs at the cut, 0 for a valid set. Rounding the scores to FP32, as the contract allows, explains
    a few ULPs.
    """

    rows: int
    nan_rows: int
    """Rows whose logits or bias hold a NaN."""
    malformed: int
    """Rows with an id out of range or twice."""
    disagreements: int
    """Judged rows whose set is not a valid top-k set; malformed rows included."""
    violation_ulps: Tensor
    """float64: 0 where valid or not judged, infinity where malformed."""
    margin_ulps: Tensor
    """float64: gap between the k-th and the next score, in FP32 ULPs; 0 is a tie; NaN where not judged."""
    order_ulps: Tensor
    """float64: largest rise of the score along the ids, in FP32 ULPs; they should fall."""
    weight_error: float | None
    """Largest relative error of the weights against the unbiased scores of the same ids; None without
    weights."""

    def disagreements_beyond(self, ulps: float) -> int:
        """Rows whose set is wrong by more than `ulps` FP32 ULPs."""
        return int((self.violation_ulps > ulps).sum())


def route_disagreements(
    logits: Tensor,
    bias: Tensor,
    ids: Tensor,
    k: int,
    weights: Tensor | None = None,
    scaling: float = 1.0,
) -> RouteJudgement:
    """Judge the ids (and weights) that a router chose.

    logits: [n, E]; bias: [E]; ids: int64 [n, k]; weights: [n, k] or None. A set is valid if it has k
    distinct ids and no score left out is larger than one taken, where score = sigmoid(logits) + bias in FP64.
    Raises ValueError for shapes that do not belong together.
    """
    n, E = logits.shape
    if ids.shape != (n, k) or bias.shape != (E,) or not 0 < k <= E:
        raise ValueError(
            f"routing {n} rows to {k} of {E} experts cannot have ids {tuple(ids.shape)} and bias {tuple(bias.shape)}"
        )
    s = logits.double().sigmoid()
    score = s + bias.double()
    judged = ~score.isnan().any(-1)
    wellformed = _wellformed(ids, E)
    safe = torch.where(wellformed[:, None], ids, torch.arange(k, device=ids.device))
    taken = score.gather(-1, safe)
    left_out = score.scatter(-1, safe, -torch.inf)
    ranked = score.sort(dim=-1, descending=True).values
    ulp = F32.ulp(ranked[:, k - 1])
    runner_up = ranked[:, k] if k < E else torch.full_like(ranked[:, 0], -torch.inf)
    violation = (left_out.amax(-1) - taken.amin(-1)).clamp(min=0) / ulp
    violation = torch.where(wellformed, violation, torch.inf)
    violation = torch.where(judged, violation, 0.0)
    rise = (taken[:, 1:] - taken[:, :-1]).clamp(min=0).amax(-1) / ulp if k > 1 else torch.zeros_like(ulp)
    return RouteJudgement(
        rows=n,
        nan_rows=int((~judged).sum()),
        malformed=int((~wellformed & judged).sum()),
        disagreements=int((violation > 0).sum()),
        violation_ulps=violation,
        margin_ulps=torch.where(judged, (ranked[:, k - 1] - runner_up) / ulp, torch.nan),
        order_ulps=torch.where(judged & wellformed, rise, 0.0),
        weight_error=None if weights is None else _weight_error(s, safe, weights, scaling, judged & wellformed),
    )


def _wellformed(ids: Tensor, E: int) -> Tensor:
    ordered = ids.sort(dim=-1).values
    return (ordered[:, 0] >= 0) & (ordered[:, -1] < E) & (ordered[:, 1:] != ordered[:, :-1]).all(-1)


def _weight_error(s: Tensor, ids: Tensor, weights: Tensor, scaling: float, judged: Tensor) -> float:
    expected = route_weights(s, ids, scaling)[judged]
    if not expected.numel():
        return 0.0
    # FP32 holds nothing below its least normal number to a relative error, and a path may have 0 there.
    error = (weights.double()[judged] - expected).abs() / expected.clamp_min(2.0**-126)
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
