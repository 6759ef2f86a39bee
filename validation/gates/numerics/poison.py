"""Cases and memory with poison in every place that an op must not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from numerics.formats import E4M3_NAN
from numerics.oracles.case import numbered
from validation.targets.base import Case

POISONS = {"NaN": float("nan"), "3e38": 3e38}
"""What unread memory is filled with. NaN survives a product with zero; 3e38 survives a max and overflows a sum."""

_ALLOCATORS = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
    torch.Tensor.resize_,
}

_FIRST_ROWS: dict[str, tuple[str, ...]] = {
    "projection": ("x",),
    "rms_norm": ("x",),
    "all_reduce": ("y",),
    "attn_res": ("prefix", "delta"),
    "output_mix": ("y", "prefix"),
    "kda_step": ("proj",),
    "kda_verify": ("proj",),
    "mla_query": ("a",),
    "mla_attend": ("q",),
    "mla_attend_dcp": ("q",),
    "mla_value": ("latent", "gate"),
    "moe_front": ("x",),
    "route": ("logits",),
    "experts": ("z", "weights"),
    "shared_expert": ("x",),
    "moe_tail": ("latent", "shared"),
}
"""Inputs of a row that `garbled_cases` fills with NaNs, one at a time."""


_WIDENED = {
    **_FIRST_ROWS,
    "attn_res": ("prefix", "delta", "blocks"),
    "output_mix": ("prefix", "blocks", "y"),
    "kda_step": ("proj", "slots"),
    "kda_verify": ("proj", "sources", "targets"),
    "kda_sequence": ("proj",),
    "mla_query": ("a", "cache", "positions"),
    "mla_attend": ("q", "cache", "block_table", "lengths"),
    "mla_attend_dcp": ("q", "cache", "block_table", "lengths"),
    "mla_attend_sequence": ("q", "cache", "block_table"),
    "experts": ("z", "ids", "weights"),
}
"""Inputs that `widened` gives gaps."""


class PoisonedScratch(TorchFunctionMode):
    """Fills every tensor that is allocated without values while the mode is on."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self._poison = poison

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            # An integer that names nothing: as an index it is refused, as a byte it is the NaN of E4M3 and E8M0.
            result.fill_(self._poison if result.is_floating_point() else torch.iinfo(result.dtype).max)
        return result


def poisoned(op: str, case: Case, poison: float) -> dict[str, Any] | None:
    """The case with everything poisoned that the op must not read; None where there is nothing such."""
    if op in ("kda_step", "kda_verify"):
        sources = case["slots" if op == "kda_step" else "sources"]
        proj = case["proj"].clone()
        proj.view(sources.shape[0], -1)[sources == 0] = poison
        return {**case, **_pools_outside(case, sources[sources > 0], poison), "proj": proj}
    if op == "kda_sequence":
        return {**case, **_pools_outside(case, torch.tensor([case["slot"]]), poison)}
    if op in ("mla_attend", "mla_attend_sequence"):
        return {**case, "cache": _poisoned_cache(op, case, poison)}
    if op == "mla_attend_dcp":
        return {**case, **_poisoned_shards(case, poison)}
    if op in ("attn_res", "output_mix"):
        blocks = case["blocks"].clone()
        blocks[:, case["num_blocks"] :] = poison
        prefix = torch.full_like(case["prefix"], poison) if case.get("replace_prefix") else case["prefix"]
        return {**case, "blocks": blocks, "prefix": prefix}
    if op == "mla_query":
        filler = E4M3_NAN if case["cache"].dtype == torch.uint8 else poison
        return {**case, "cache": torch.full_like(case["cache"], filler)}
    if op == "experts":
        return {**case, **_unchosen_experts(case)}
    return None


def garbled_cases(op: str, case: Case) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The case with NaNs for one input of half of its rows, for another input of the other half; and which rows, bool.

    A padded row of a captured batch may hold anything: it must not reach the others. The halves differ from case to
    case, so that any two rows are on different sides in every other case; the first and the last always are. So do the
    inputs: a NaN that one of them brings alone (a rank's partial, a gate) must not be lost behind those of the others.
    None where the op has no rows, or a single one. A row of `kda_verify` is a request.
    """
    if op not in _FIRST_ROWS or (count := rows_of(op, case)) < 2:
        return
    unread = "prefix" if case.get("replace_prefix") else ""
    names = [name for name in _first_rows(op, case) if case[name].numel() and name != unread]
    drawn = int(case[names[0]].flatten()[:64].double().nan_to_num().abs().sum() * 2**16) % 2**31
    half = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(drawn)).bool()
    half[0], half[-1] = True, False
    for place, rows in enumerate((half, ~half)):
        name = names[(drawn + place) % len(names)]
        by_row = case[name].clone().view(count, -1)
        by_row[rows] = E4M3_NAN if by_row.dtype == torch.uint8 else float("nan")
        yield {**case, name: by_row.view_as(case[name])}, rows


def rows_of(op: str, case: Case) -> int:
    """Rows of a case, requests of `kda_verify`."""
    return int(case["sources"].shape[0] if op == "kda_verify" else case[_first_rows(op, case)[0]].shape[0])


def _first_rows(op: str, case: Case) -> list[str]:
    return [key for key in case if key.split(".")[0] in _FIRST_ROWS[op]]


def widened(op: str, case: Case) -> dict[str, Any]:
    """The same case with gaps behind every slot of its pools, and every row of its caches and inputs.

    Of a list of slots, positions or lengths every other element is a gap: the second column of a larger table. Every
    other rank has gaps twice as wide. Pages, banks of blocks and rows of heads have one more entry behind them where
    they are only read: `mla_query` takes the pages of a cache to lie side by side.
    """
    names = [key for key in case if key.split(".")[0] in _WIDENED.get(op, ())]
    pools = [name for name in ("conv_state", "state") if name in case]
    return {
        **case,
        **{name: _with_gaps(case[name], -1, 1 + _rank(name) % 2, outer=op != "mla_query") for name in names},
        **{name: _with_gaps(case[name], 1) for name in pools},
    }


def _rank(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _with_gaps(x: Tensor, axis: int, times: int = 1, outer: bool = False) -> Tensor:
    """A view of a larger tensor that is longer along `axis` by a third of a typical vector load, or `times` that.

    It starts one element into its storage: at an address that no vector load may take for granted. Gaps hold NaN, which
    nobody reads without a trace and nobody overwrites with zeros unseen; among integers, which name something, 0.
    `outer`: the middle axis is longer by one, too.
    """
    if x.shape == (1,):
        return x
    if x.dim() == 1:
        column = x.new_zeros(x.shape[0], 2)[:, 1]
        column.copy_(x)
        return column
    shape = list(x.shape)
    shape[axis] += times * (8 if x.element_size() < 4 else 4)
    if outer and x.dim() > 2:
        shape[1] += 1
    filler = float("nan") if x.is_floating_point() else E4M3_NAN if x.dtype == torch.uint8 else 0
    view = x.new_full(shape, filler).narrow(axis, 1, x.shape[axis]).narrow(1, 0, x.shape[1])
    view.copy_(x)
    return view


def _pools_outside(case: Case, owned: Tensor, poison: float) -> dict[str, Tensor]:
    pools = {}
    for name in ("conv_state", "state"):
        pools[name] = torch.full_like(case[name], poison)
        pools[name][owned] = case[name][owned]
    return pools


def _unchosen_experts(case: Case) -> dict[str, Tensor]:
    """Scales of NaN, the only poison they hold, for experts that no row chose."""
    unchosen = torch.ones(case["w13_scale"].shape[0], dtype=torch.bool)
    unchosen[case["ids"].unique()] = False
    scales = {name: case[name].clone() for name in ("w13_scale", "w2_scale")}
    for scale in scales.values():
        scale[unchosen] = 0xFF
    return scales


def _poisoned_cache(op: str, case: Case, poison: float) -> Tensor:
    """The latent cache with every row poisoned that no length reaches."""
    if op == "mla_attend":
        return _unread_poisoned(case["cache"], case["block_table"], case["lengths"].tolist(), poison)
    tables, lengths = case["block_table"][None], [case["start"] + case["q"].shape[0]]
    return _unread_poisoned(case["cache"], tables, lengths, poison)


def _poisoned_shards(case: Case, poison: float) -> dict[str, Tensor]:
    """Every rank's pool with every row poisoned that the rank's share of no length reaches."""
    pools = numbered(case, "cache")
    shares = [[-(-max(0, n - rank) // len(pools)) for n in case["lengths"].tolist()] for rank in range(len(pools))]
    return {
        f"cache.{rank}": _unread_poisoned(pool, case["block_table"], shares[rank], poison)
        for rank, pool in enumerate(pools)
    }


def _unread_poisoned(cache: Tensor, tables: Tensor, lengths: Sequence[int], poison: float) -> Tensor:
    page = cache.shape[1]
    read = torch.zeros(cache.shape[0] * page, dtype=torch.bool)
    for table, length in zip(tables, lengths, strict=True):
        positions = torch.arange(length)
        read[table[positions // page] * page + positions % page] = True
    # An E4M3 cache has no infinity and no 3e38; its NaN byte is the only poison it can hold.
    filler = E4M3_NAN if cache.dtype == torch.uint8 else poison
    spoiled = torch.full_like(cache, filler)
    spoiled.view(-1, cache.shape[-1])[read] = cache.view(-1, cache.shape[-1])[read]
    return spoiled
