"""FP64 oracles of NoPE multi-head latent attention, in absorbed form over a paged latent cache (BF16 or
E4M3)."""

from __future__ import annotations

import torch
from torch import Tensor

from numerics.formats import E4M3_MAX
from numerics.oracles.case import Case, Outputs, numbered, stored_values
from numerics.oracles.linear import linear, rms


def mla_query(case: Case) -> Outputs:
    """q row = [(q_b q_n)_nope W_UK | (q_b q_n)_rope] and cache row = [kv_n | k_pe], not quantised.

    Returns q [n, h, C+R] and the whole cache [pages, page, C+R], in the unit of the activations (bytes
    times their scale). An FP8 output saturates at 448 times its scale, here too: that is its meaning, not
    a rounding. Positions inside page 0 are null and write nothing; their rows still give a q.
    """
    cache = stored_values(case["cache"], case["k_scale"])
    a = case["a"].double()
    (h, nope, C), row = case["w_uk"].shape, cache.shape[-1]
    q_c, kv_c, k_pe = a.split([a.shape[-1] - row, C, row - C], dim=-1)
    eps = case["eps"]
    q = linear(rms(q_c, eps) * case["q_norm_weight"].double(), case["q_b"]).view(a.shape[0], h, -1)
    ql = torch.einsum("nhp,hpc->nhc", q[..., :nope], case["w_uk"].double())
    q = torch.cat([ql, q[..., nope:]], dim=-1)
    rows = torch.cat([rms(kv_c, eps) * case["kv_norm_weight"].double(), k_pe], dim=-1)
    if case["cache"].dtype is torch.uint8:
        q, rows = _saturate(q, case["q_scale"]), _saturate(rows, case["k_scale"])
    live = case["positions"] >= cache.shape[1]
    cache.view(-1, row)[case["positions"][live]] = rows[live]
    return {"q": q, "cache": cache}


def mla_attend(case: Case) -> Outputs:
    """latent = softmax(softmax_scale q K^T) V of each row over its own pages, V = the first kv_rank
    elements of K.

    Row i sees the first lengths[i] tokens of the pages block_table[i]; a row of length 0 gives 0. Returns
    latent [n, h, C]. Scales count for stored E4M3 only.
    """
    rows = [
        _attend(case, q, table, int(length))
        for q, table, length in zip(case["q"], case["block_table"], case["lengths"], strict=True)
    ]
    return {"latent": torch.stack(rows)}


def mla_attend_dcp(case: Case) -> Outputs:
    """As `mla_attend` where rank r of R has, in a pool of its own, the tokens r, r + R, r + 2R, ... of every
    request, in the pages that the one block table names for all ranks. latent [n, h, C]."""
    pools = numbered(case, "cache")
    rows = []
    for q, table, length in zip(case["q"], case["block_table"], case["lengths"].tolist(), strict=True):
        keys = pools[0].new_zeros(length, pools[0].shape[-1])
        for rank, own in enumerate(pools):
            held = -(-max(0, length - rank) // len(pools))
            keys[rank :: len(pools)] = own[table[: -(-held // own.shape[1])]].flatten(0, 1)[:held]
        rows.append(_softmax(case, q, keys))
    return {"latent": torch.stack(rows)}


def mla_attend_sequence(case: Case) -> Outputs:
    """As `mla_attend` for T consecutive tokens of one request: row t sees start + t + 1 keys. latent [T,
    h, C]."""
    start, table = case["start"], case["block_table"]
    rows = [_attend(case, q, table, start + t + 1) for t, q in enumerate(case["q"])]
    return {"latent": torch.stack(rows)}


def mla_value(case: Case) -> Outputs:
    """y = (latent W_UV) sigmoid(gate) per head. latent [n, h, C]; w_uv [h, C, v]; gate [n, h*v]; y [n,
    h*v]."""
    v = torch.einsum("nhc,hcv->nhv", case["latent"].double(), case["w_uv"].double()).flatten(1)
    return {"y": v * case["gate"].double().sigmoid()}


def _attend(case: Case, q: Tensor, table: Tensor, length: int) -> Tensor:
    """One row: q [h, C+R] over the first `length` tokens of its pages. Nothing beyond them is read."""
    pages = table[: -(-length // case["cache"].shape[1])]
    return _softmax(case, q, case["cache"][pages].flatten(0, 1)[:length])


def _softmax(case: Case, q: Tensor, stored: Tensor) -> Tensor:
    """One row: q [h, C+R] over its keys as stored, [length, C+R]; zeros without keys."""
    C = case["kv_rank"]
    if not len(stored):
        return torch.zeros(q.shape[0], C, dtype=torch.float64, device=q.device)
    K = stored_values(stored, case["k_scale"])
    scores = stored_values(q, case["q_scale"]) @ K.T
    weights = torch.softmax(scores * case["softmax_scale"], -1)
    return weights @ K[:, :C]


def _saturate(x: Tensor, scale: float) -> Tensor:
    return x.clamp(-E4M3_MAX * scale, E4M3_MAX * scale)
