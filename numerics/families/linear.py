"""Input families of projection, RMSNorm, all-reduce, attention residuals and the output mix."""

from __future__ import annotations

from typing import Any

from numerics.families.constants import EPS, turned
from numerics.families.dims import Dims
from numerics.families.draw import Draw

FAINT = 2.0**-8
"""Factor that takes mean squares of magnitude 1 to about 1e-5, where a norm's constant decides."""
BEYOND_FP16 = 2.0**24
"""Factor that takes values of about 1, and sums that nearly cancel, beyond what FP16 holds. A power of two: nothing
else changes."""
OUTLIER = 1000.0
"""Size of the channels that trained residual streams have among those of about 1."""
PIT = -200.0
"""Score of every source of the `pits` families: below what exp holds in FP32, so that only a softmax that subtracts its
own maximum leaves anything."""
BRANCHES = {"attn_res": ("first_layer", "final"), "output_mix": ("block_write",)}
"""Families that take another way through the op, as one layer in many does at every step: they come at every bin."""


def product_inputs(draw: Draw, family: str, rows: int, K: int, *out: int) -> tuple[Any, list[Any]]:
    """x bf16 [rows, K] and one weight bf16 [N, K] per N of `out`, for results of magnitude 1.

    Family `cancelling`: the second half of every sum nearly cancels the first, so that accumulating in
    BF16, or rounding between partial sums, is gross (the result is about 1/50 of its terms).
    """
    x = draw.bf16(rows, K)
    weights = [draw.bf16(N, K, std=max(K, 1) ** -0.5) for N in out]
    if family == "cancelling":
        half = K // 2
        x[:, half : 2 * half] = x[:, :half]
        for W in weights:
            W[:, :half], W[:, half : 2 * half] = draw.cancelling(W[:, :half], 0.02)
    elif family == "subnormals":
        x = draw.with_subnormals(x)
    return x, weights


def projection(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    x, (weight,) = product_inputs(draw, family, rows, dims["hidden_size"], dims["projection_size"])
    return {"x": x * BEYOND_FP16 if family == "cancelling" else x, "weight": weight}


def rms_norm(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`outliers`: one channel in 64 is 1000 times as large, as in trained residual streams; all beyond FP16's range."""
    H = dims["hidden_size"]
    x = draw.bf16(rows, H)
    if family == "outliers":
        x[:, draw.one(0, 64) :: 64] *= OUTLIER
        x *= BEYOND_FP16
    elif family == "faint":
        x *= FAINT
    elif family == "subnormals":
        x = draw.with_subnormals(x)
    return {"x": x, "weight": draw.norm_weight(H), "eps": turned(draw, rows, EPS)}


def rank_partials(draw: Draw, family: str, name: str, ranks: int, rows: int, width: int) -> dict[str, Any]:
    """`name.0` .. of one op, bf16 [rows, width]; in `cancelling`, odd ranks nearly cancel even ones."""
    parts = [draw.bf16(rows, width) * (FAINT if family == "faint" else 1.0) for _ in range(ranks)]
    if family == "cancelling":
        for r in range(1, ranks, 2):
            parts[r - 1], parts[r] = draw.cancelling(parts[r - 1], 0.02)
    elif family == "subnormals":
        parts = [draw.with_subnormals(x) for x in parts]
    return {f"{name}.{r}": x for r, x in enumerate(parts)}


def all_reduce(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    partials = rank_partials(draw, family, "y", dims["ranks"], rows, dims["hidden_size"])
    return {name: y * BEYOND_FP16 if family == "cancelling" else y for name, y in partials.items()}


def attn_res(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`peaked`: source logits of +-30. `pits`: all of about -200. `equal_sources`: all blocks alike, an exact tie.
    `first_layer`: no blocks, no delta. `full`: every block in use. `final`: no output norm. Blocks not in use hold
    garbage."""
    case = _mix_inputs(draw, dims, family, rows)
    if family == "equal_sources":
        case["blocks"][:, : case["num_blocks"]] = case["prefix"][:, None]
    elif family == "first_layer":
        case["num_blocks"] = 0
        case["blocks"] = draw.garbage(*case["blocks"].shape)
    else:
        case["delta"] = draw.bf16(rows, dims["hidden_size"], std=0.5)
    if family == "final":
        del case["out_norm_weight"]
    if family == "subnormals":
        for name in ("prefix", "delta", "blocks"):
            case[name] = draw.with_subnormals(case[name])
    elif family == "faint":
        for name in ("prefix", "delta", "blocks"):
            case[name] *= FAINT
    return case


def output_mix(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`block_write`: the output starts a new prefix; the old one, garbage here, must not be read. `idle_rank`: the last
    of several ranks owns no heads, so its input has no columns. `pits`: source logits of about -200."""
    ranks, K, H = dims["ranks"], dims["num_attention_heads"] * dims["v_head_dim"], dims["hidden_size"]
    case = _mix_inputs(draw, dims, family, rows)
    for r in range(ranks):
        idle = family == "idle_rank" and 0 < r == ranks - 1
        x, (W,) = product_inputs(draw, family, rows, 0 if idle else K, H)
        case |= {f"y.{r}": x, f"weight.{r}": W}
    case["replace_prefix"] = family == "block_write"
    if case["replace_prefix"]:
        case["prefix"] = draw.garbage(rows, H)
    if family == "faint":
        for name in ("prefix", "blocks", *(f"y.{r}" for r in range(ranks))):
            case[name] *= FAINT
    return case


def _mix_inputs(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    H, NB = dims["hidden_size"], dims["attn_res_blocks"]
    num_blocks = NB if family in ("full", "final") else min(dims.get("blocks_used", max(NB - 1, 1)), NB)
    blocks = draw.garbage(rows, NB, H)
    for s in range(num_blocks):
        # Later blocks sum more layers and are larger, so weights and sources cannot be swapped unseen.
        blocks[:, s] = draw.bf16(rows, H, std=0.5 + 0.5 * s)
    spread = 30.0 if family == "peaked" else 1.5
    case: dict[str, Any] = {
        "prefix": draw.bf16(rows, H),
        "blocks": blocks,
        "num_blocks": num_blocks,
        "norm_weight": draw.norm_weight(H),
        "query_weight": draw.bf16(H, std=spread * H**-0.5),
        "eps": turned(draw, rows, EPS),
        "out_norm_weight": draw.norm_weight(H),
    }
    if family == "pits":
        # One channel that is far larger than the rest has about sqrt(H) of every normalised source.
        loud = int(case["norm_weight"].argmax())
        case["prefix"][:, loud], blocks[:, :num_blocks, loud] = OUTLIER, OUTLIER
        case["query_weight"][loud] = PIT * H**-0.5
    return case


FAMILIES = {
    "projection": ("iid", "cancelling", "subnormals"),
    "rms_norm": ("iid", "outliers", "faint", "subnormals"),
    "all_reduce": ("iid", "cancelling", "subnormals"),
    "attn_res": ("iid", "peaked", "equal_sources", "first_layer", "full", "final", "faint", "subnormals", "pits"),
    "output_mix": ("iid", "block_write", "full", "idle_rank", "cancelling", "faint", "subnormals", "pits"),
}
