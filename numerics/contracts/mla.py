"""Contract oracles of NoPE multi-head latent attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from numerics.contracts import bounded as fp
from numerics.contracts.bounded import Bounded, exact
from numerics.contracts.check import Expected, Stored
from numerics.contracts.linear import at
from numerics.contracts.roundings import KEYS_PER_BLOCK, Contract, split_length
from numerics.oracles.case import Case, numbered, stored_values


def mla_query(case: Case, contract: Contract) -> dict[str, Expected]:
    """q and the whole cache, in units of their scales where they are stored as E4M3."""
    cache = stored_values(case["cache"], 1.0)
    a = case["a"].double()
    (h, nope, C), row, eps = case["w_uk"].shape, cache.shape[-1], case["eps"]
    q_c, kv_c, k_pe = (exact(x) for x in a.split([a.shape[-1] - row, C, row - C], dim=-1))
    q_n = at(contract, "q_n", fp.mul(fp.normalised(q_c, eps), exact(case["q_norm_weight"])))
    q = at(contract, "q", fp.linear(q_n, case["q_b"])).map(lambda x: x.view(a.shape[0], h, -1))
    nope_part = q.map(lambda x: x[..., :nope].transpose(0, 1))
    absorbed = fp.matmul(nope_part, exact(case["w_uk"])).map(lambda x: x.transpose(0, 1))
    query = fp.concatenated([at(contract, "absorbed", absorbed), q.map(lambda x: x[..., nope:])])
    kv_n = at(contract, "kv_n", fp.mul(fp.normalised(kv_c, eps), exact(case["kv_norm_weight"])))
    rows = fp.concatenated([kv_n, k_pe])
    fmt: Stored = "bf16"
    if case["cache"].dtype is torch.uint8:
        fmt = "e4m3"
        query, rows = (fp.scaled(x, 1.0 / case[s]) for x, s in ((query, "q_scale"), (rows, "k_scale")))
    value, radius = cache.view(-1, row), torch.zeros_like(cache).view(-1, row)
    live = case["positions"] >= cache.shape[1]
    value[case["positions"][live]], radius[case["positions"][live]] = rows.value[live], rows.radius[live]
    written = Bounded(value.view_as(cache), radius.view_as(cache))
    return {"q": Expected(query, fmt), "cache": Expected(written, fmt)}


def mla_attend(case: Case, contract: Contract) -> dict[str, Expected]:
    n, page = case["q"].shape[0], case["cache"].shape[1]
    split = split_length(n, case["block_table"].shape[1], page) if contract.split_keys else None
    rows = [
        _attend(case, contract, q, case["cache"][table[: -(-length // page)]].flatten(0, 1)[:length], split)
        for q, table, length in zip(case["q"], case["block_table"], case["lengths"].tolist(), strict=True)
    ]
    return _joined(rows)


def mla_attend_dcp(case: Case, contract: Contract) -> dict[str, Expected]:
    """Keys rank by rank: what the sum over all of them allows does not depend on their order."""
    pools = numbered(case, "cache")
    n, page, ranks = case["q"].shape[0], pools[0].shape[1], len(pools)
    split = split_length(n, case["block_table"].shape[1], page) if contract.split_keys else None
    rows = []
    for q, table, length in zip(case["q"], case["block_table"], case["lengths"].tolist(), strict=True):
        held = [-(-max(0, length - rank) // ranks) for rank in range(ranks)]
        shards = [
            pool[table[: -(-own // page)]].flatten(0, 1)[:own] for pool, own in zip(pools, held, strict=True) if own
        ]
        keys = torch.cat(shards) if shards else pools[0][0, :0]
        rows.append(_attend(case, contract, q, keys, split, [own for own in held if own]))
    return _joined(rows)


def mla_attend_sequence(case: Case, contract: Contract) -> dict[str, Expected]:
    start, page = case["start"], case["cache"].shape[1]
    last = start + case["q"].shape[0]
    keys = case["cache"][case["block_table"][: -(-last // page)]].flatten(0, 1)
    return _joined([_attend(case, contract, q, keys[: start + t + 1], None) for t, q in enumerate(case["q"])])


def mla_value(case: Case, contract: Contract) -> dict[str, Expected]:
    product = fp.matmul(exact(case["latent"].transpose(0, 1)), exact(case["w_uv"])).map(lambda x: x.transpose(0, 1))
    value = at(contract, "value", product).map(lambda x: x.flatten(1))
    return {"y": Expected(fp.mul(value, fp.sigmoid(exact(case["gate"]))), "bf16")}


def _joined(rows: list[Bounded]) -> dict[str, Expected]:
    value, radius = (torch.stack([getattr(row, name) for row in rows]) for name in ("value", "radius"))
    return {"latent": Expected(Bounded(value, radius), "bf16")}


def _attend(
    case: Case, contract: Contract, q: Tensor, stored: Tensor, split: int | None, held: Sequence[int] = ()
) -> Bounded:
    """One row: q [h, C+R] over its keys as stored, in splits of `split` keys or in one piece.

    `held`: keys of each rank that has some, which lie rank after rank; nothing where one rank has them all.
    """
    C, length, fp8 = case["kv_rank"], len(stored), stored.dtype is torch.uint8
    if not length:
        return exact(torch.zeros(q.shape[0], C, dtype=torch.float64))
    keys = stored_values(stored, 1.0)
    scale = case["softmax_scale"] * (case["q_scale"] * case["k_scale"] if fp8 else 1.0)
    # Two more roundings: scores may be in base 2, which multiplies by a rounded log2(e).
    scores = fp.rounded_f32(fp.scaled(fp.matmul(exact(stored_values(q, 1.0)), exact(keys.T)), scale), 2.0)
    top = scores.value.amax(-1, keepdim=True)
    masses, rounded = [], []
    for own in _ranks(scores, held):
        rank_top = own.value.amax(-1, keepdim=True)
        pieces = [own[:, a : a + (split or length)] for a in range(0, own.value.shape[-1], split or length)]
        numerators = [_numerators(piece, contract, split is not None) for piece in pieces]
        joins = [_join(own_top, rank_top, fp.total(p, keepdim=True)) for (p, _), own_top in numerators]
        if held:
            joins = _joined_again(joins, [p for (p, _), _ in numerators], rank_top, top)
        masses += [fp.mul(fp.total(p, keepdim=True), join) for ((p, _), _), join in zip(numerators, joins, strict=True)]
        rounded += [fp.mul(values, join) for ((_, values), _), join in zip(numerators, joins, strict=True)]
    inverse = fp.reciprocal(fp.total(fp.concatenated(masses), keepdim=True))
    latent = fp.mul(fp.matmul(fp.concatenated(rounded), exact(keys[:, :C])), inverse)
    return fp.scaled(latent, case["k_scale"]) if fp8 else latent


def _ranks(scores: Bounded, held: Sequence[int]) -> list[Bounded]:
    """The scores of each rank's keys; of all of them where one rank has them."""
    ends = list(itertools.accumulate(held)) or [scores.value.shape[-1]]
    return [scores[:, start:end] for start, end in itertools.pairwise([0, *ends])]


def _joined_again(joins: list[Bounded], numerators: list[Bounded], rank_top: Tensor, top: Tensor) -> list[Bounded]:
    """Weights of a rank's splits, joined into one row of this rank, in the join of the ranks.

    The rank's row is divided by the sum of its splits' weights, which its log-sum-exp brings back: a few nonnegative
    terms, each addition of which rounds once, a division and a product.
    """
    masses = [fp.mul(fp.total(p, keepdim=True), join) for p, join in zip(numerators, joins, strict=True)]
    mass = fp.total(fp.concatenated(masses), keepdim=True)
    outer = _join(rank_top, top, mass)
    return [fp.mul(join, outer, roundings=2.0 + len(joins)) for join in joins]


def _numerators(scores: Bounded, contract: Contract, running: bool) -> tuple[tuple[Bounded, Bounded], Tensor]:
    """Numerators of a piece as they are summed and as they are multiplied, and the score that they are relative to.

    `running`: they are rounded relative to the largest score so far, and brought to that of the whole piece after it.
    """
    top = scores.value.amax(-1, keepdim=True)
    so_far = _running_top(scores.value) if running else top
    p = fp.exp(fp.add(scores, exact(-so_far)))
    rounded = at(contract, "p", p)
    if running:
        rescale = fp.exp(exact(so_far - top))
        p, rounded = fp.mul(p, rescale), fp.mul(rounded, rescale)
    return (p, rounded), top


def _running_top(scores: Tensor) -> Tensor:
    """Per key, the largest score of its block and of those before it. scores [h, keys] of one split."""
    blocks = torch.stack([block.amax(-1) for block in scores.split(KEYS_PER_BLOCK, dim=-1)], dim=-1)
    return blocks.cummax(-1).values.repeat_interleave(KEYS_PER_BLOCK, -1)[:, : scores.shape[-1]]


def _join(own_top: Tensor, top: Tensor, mass: Bounded) -> Bounded:
    """Weight exp(own_top - top) of a split. It comes from two log-sum-exps in base 2, each of which is rounded twice at
    its own size: where the logarithm is added to the largest score, and where the other one is subtracted."""
    lse = (own_top.abs() + mass.value.log().abs()) / math.log(2)
    relative = fp.U * (4.0 * lse + fp.ELEMENTARY_ULPS)
    value = (own_top - top).exp()
    return fp.rounded_f32(Bounded(value, value * relative * math.log(2)), 2.0)
