"""Input families of the latent mixture of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from numerics.families.constants import BETA, EPS, LINEAR_BETA, SCALING, turned
from numerics.families.dims import Dims
from numerics.families.draw import Draw
from numerics.families.linear import product_inputs, rank_partials
from numerics.formats import E2M1_VALUES, E8M0_NAN, MXFP4_BLOCK, bf16

LARGE = 32.0
"""Factor on the first weights of the `large_situ` families: |g| and |u| then reach 10 to 100, where SiTU
saturates at its two betas and SiLU, its look-alike near 0, does not."""
DEEP, LOUD = 30, 10
"""Binades of `wide_range`: a block scale of 2^-30 and less is beyond FP16, a weight of 2^-10 beyond what shows."""
UNUSED_SCALE = 190
"""E8M0 scale (2^63) of experts that no row chose."""


def moe_front(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    E, L = dims["num_experts"], dims["routed_expert_hidden_size"]
    x, (gate_weight, down_weight) = product_inputs(draw, family, rows, dims["hidden_size"], E, L)
    return {"x": x, "gate_weight": gate_weight, "down_weight": down_weight}


def route(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`close_scores`: gaps at the cut of a few hundred FP32 ULPs, which BF16 logits or scores destroy.
    `hair_scores`: gaps of about 27 FP32 ULPs, which an epsilon for ties destroys. `close_bias`: scores and biases vary
    by less than a BF16 ULP of the bias. `coverage`: every row favours experts of its own, all of them over the rows;
    row 0 the first, the last and those at either side of a multiple of 256, where a block of threads ends.
    `saturated`: logits x 30; a sigmoid in FP32 is exactly 1 above 17. `exact_ties`: few different scores;
    the last row is all zero. `tiny_scores`: sigmoid around 1e-8 under a bias around 12, so that a score
    recovered as (s + b) - b is lost. `negative_scores`: every score is below 0 with its bias. `vanishing_scores`: in
    one row of two no sigmoid is above 0 in FP32, in the other their sum is about the constant that is added to it."""
    E = dims["num_experts"]
    logits, bias, scaling = draw.normal(rows, E, std=1.5), draw.normal(E, std=0.1), turned(draw, rows, SCALING)
    if family == "close_scores":
        logits, bias = draw.normal(rows, E, std=0.05, mean=1.0), torch.zeros(E)
    elif family == "hair_scores":
        steps = torch.stack([draw.permutation(E) for _ in range(rows)])
        logits, bias = 1.0 + steps.float() * 2.0**-17, torch.zeros(E)
    elif family == "close_bias":
        logits, bias = draw.normal(rows, E, std=2e-3), 0.75 + draw.normal(E, std=5e-4)
    elif family == "coverage":
        k = dims["num_experts_per_token"]
        favoured = _edges_first(draw, E)[torch.arange(rows * k) % E].view(rows, k)
        logits, bias = logits.scatter(-1, favoured, 8.0 + draw.uniform(0.0, 1.0, rows, k)), torch.zeros(E)
    elif family == "saturated":
        logits = logits * 30
    elif family == "exact_ties":
        logits = draw.integers(-3, 4, rows, E) / 2
        logits[-1] = 0.0
        bias = draw.integers(0, 2, E) / 4
    elif family == "tiny_scores":
        logits = draw.normal(rows, E, std=0.5, mean=-18.0)
        # Steps far above an FP32 ULP at 12 (1e-6): which experts are chosen is then not in doubt.
        bias = 12 + draw.permutation(E).float() / 128
    elif family == "negative_scores":
        bias = bias - 2.0
    elif family == "vanishing_scores":
        logits = draw.normal(rows, E, std=0.5, mean=-46.0)
        logits[::2] = draw.normal(len(logits[::2]), E, std=0.5, mean=-200.0)
        bias = draw.permutation(E).float() / 128
    return {"logits": logits, "bias": bias, "top_k": dims["num_experts_per_token"], "scaling": scaling}


def experts(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`scattered_scales`: block scales over 12 binades, so that one out of place is gross. `one_set`:
    every row chose the same experts, in another order. `coordinate_scales`: no scale equals that of a neighbouring
    expert, row or block, so that a wrong stride or order moves every value. `padded_blocks`: w2 has one block more than
    the expert's width, of random codes under the scale NaN. `wide_range`: every other block of z and of the weights
    that meet it is 2^30 times larger and smaller, the others the other way round; experts of odd id are 2^10 times as
    loud as the others and weighed by as much less; and what they give is about 2^-40. Experts that no row chose hold
    garbage."""
    held, k = dims["experts_held"], dims["num_experts_per_token"]
    L, I = dims["routed_expert_hidden_size"], dims["moe_intermediate_size"]
    ids = _expert_ids(draw, held, k, rows, one_set=family == "one_set")
    z = draw.bf16(rows, L)
    if family == "subnormals":
        z = draw.with_subnormals(z)
    spread = 6 if family == "scattered_scales" else 1
    gain = LARGE if family == "large_situ" else 1.0
    w13_packed, w13_scale = _mxfp4(draw, held, 2 * I, L, gain, spread)
    w2_packed, w2_scale = _mxfp4(draw, held, L, I, 1.0, spread)
    if family == "coordinate_scales":
        w13_scale, w2_scale = _coordinate_coded(w13_scale), _coordinate_coded(w2_scale)
    elif family == "padded_blocks":
        # Columns beyond the expert's width, as a width below a block's multiple leaves them: never to be read.
        w2_packed = torch.cat([w2_packed, draw.bytes(held, L, MXFP4_BLOCK // 2)], -1)
        w2_scale = torch.cat([w2_scale, torch.full((held, L, 1), E8M0_NAN, dtype=torch.uint8)], -1)
    weights = draw.uniform(0.2, 1.0, rows, k)
    weights[:, 0] *= 8.0
    weights = weights / weights.sum(-1, keepdim=True) * turned(draw, rows, SCALING)
    if family == "wide_range":
        z, w13_scale, w2_scale, weights = _over_a_wide_range(z, w13_scale, w2_scale, weights, ids)
    unused = torch.ones(held, dtype=torch.bool)
    unused[ids.unique()] = False
    w13_scale[unused], w2_scale[unused] = UNUSED_SCALE, UNUSED_SCALE
    return {
        "z": z,
        "ids": ids,
        "weights": weights,
        "w13_packed": w13_packed,
        "w13_scale": w13_scale,
        "w2_packed": w2_packed,
        "w2_scale": w2_scale,
        **_situ(draw, rows),
    }


def shared_expert(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    H, I = dims["hidden_size"], dims["shared_intermediate_size"]
    x, (gate_up,) = product_inputs(draw, family, rows, H, 2 * I)
    if family == "large_situ":
        gate_up *= LARGE
    return {"x": x, "gate_up": gate_up, "down": draw.bf16(H, I, std=I**-0.5), **_situ(draw, rows)}


def moe_tail(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    H, L, ranks = dims["hidden_size"], dims["routed_expert_hidden_size"], dims["ranks"]
    return {
        **rank_partials(draw, family, "latent", ranks, rows, L),
        **rank_partials(draw, family, "shared", ranks, rows, H),
        "norm_weight": draw.norm_weight(L),
        "up_weight": draw.bf16(H, L, std=L**-0.5),
        "eps": turned(draw, rows, EPS),
    }


def _situ(draw: Draw, rows: int) -> dict[str, float]:
    return {"beta": turned(draw, rows, BETA), "linear_beta": turned(draw, rows, LINEAR_BETA)}


def _expert_ids(draw: Draw, held: int, k: int, rows: int, one_set: bool) -> Tensor:
    """int64 [rows, k], distinct within a row, in random slot order; row 0 has the first and the last
    expert."""
    if held < k:
        raise ValueError(f"experts_held = {held} is too few for {k} experts per token")
    sets = [draw.permutation(held)[:k] for _ in range(rows)]
    if k > 1:
        inner = 1 + draw.permutation(held - 2)[: k - 2]
        sets[0] = torch.cat([torch.tensor([held - 1, 0]), inner])
    return torch.stack([(sets[0] if one_set else own)[draw.permutation(k)] for own in sets])


def _edges_first(draw: Draw, E: int) -> Tensor:
    """Every expert once: the last, the first, both sides of every multiple of 256, then the others in random order."""
    edges = [E - 1, 0, *(edge + side for edge in range(256, E, 256) for side in (-1, 0))]
    unseen = torch.ones(E, dtype=torch.bool)
    unseen[edges] = False
    rest = draw.permutation(E)
    return torch.cat([torch.tensor(list(dict.fromkeys(edges))), rest[unseen[rest]]])


def _coordinate_coded(scale: Tensor) -> Tensor:
    """Scales around the same middle that name their place: expert, row and block each step by another amount."""
    e, n, b = (
        torch.arange(size).view(shape) for size, shape in zip(scale.shape, ((-1, 1, 1), (-1, 1), (-1,)), strict=True)
    )
    middle = int(scale.float().mean())
    return (middle - 6 + (5 * e + 3 * n + b) % 13).to(torch.uint8)


def _over_a_wide_range(
    z: Tensor, w13_scale: Tensor, w2_scale: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, scales and weights of family `wide_range`; powers of two, so that they round as the given ones do."""
    binades = torch.where(torch.arange(w13_scale.shape[-1]) % 2 == 0, DEEP, -DEEP)
    z = bf16(z.double() * (2.0 ** binades.double()).repeat_interleave(MXFP4_BLOCK))
    loud = torch.where(torch.arange(w2_scale.shape[0]) % 2 == 1, LOUD, 0)
    w2 = (w2_scale.long() - DEEP - LOUD + loud[:, None, None]).to(torch.uint8)
    return z, (w13_scale.long() - binades).to(torch.uint8), w2, weights * 2.0 ** -loud[ids].float()


def _mxfp4(draw: Draw, E: int, N: int, K: int, gain: float, spread: int) -> tuple[Tensor, Tensor]:
    """Random codes and scales: packed u8 [E, N, K/2] and scale u8 [E, N, K/32], for products of magnitude
    `gain`.

    Scales lie within +-`spread` binades of a middle that makes up for their RMS. Quantising normal weights instead
    would take seconds.
    """
    code_power = sum(v * v for v in E2M1_VALUES) / len(E2M1_VALUES)
    scale_power = sum(4.0**i for i in range(-spread, spread + 1)) / (2 * spread + 1)
    middle = 127 + round(math.log2(gain / math.sqrt(code_power * scale_power * K)))
    scale = draw.integers(middle - spread, middle + spread + 1, E, N, K // MXFP4_BLOCK)
    return draw.bytes(E, N, K // 2), scale.to(torch.uint8)


FAMILIES = {
    "moe_front": ("iid", "cancelling", "subnormals"),
    "route": (
        "iid",
        "close_scores",
        "hair_scores",
        "close_bias",
        "coverage",
        "saturated",
        "exact_ties",
        "tiny_scores",
        "negative_scores",
        "vanishing_scores",
    ),
    "experts": (
        "iid",
        "scattered_scales",
        "coordinate_scales",
        "padded_blocks",
        "large_situ",
        "wide_range",
        "one_set",
        "subnormals",
    ),
    "shared_expert": ("iid", "large_situ", "cancelling", "subnormals"),
    "moe_tail": ("iid", "cancelling", "faint", "subnormals"),
}
