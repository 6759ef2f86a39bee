"""Input families of attention over a context that is sharded over ranks: those of `mla_attend`, dealt out.

Rank r of R gets the tokens r, r + R, ... of every request, in pages of a pool of its own. Lengths are the same ragged
ones, so that ranks have shares that differ by a key, and short requests leave most ranks without any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numerics.families import mla
from numerics.families.dims import Dims
from numerics.families.draw import Draw
from numerics.families.mla import Storage


def mla_attend_dcp(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """A case of `mla_attend` of the same family over `dims["ranks"]` ranks."""
    return sharded(draw, mla.mla_attend(draw, dims, family, rows), dims["ranks"])


def sharded(draw: Draw, case: dict[str, Any], ranks: int, table_pages: int | None = None) -> dict[str, Any]:
    """The case with the keys of its requests dealt out to `ranks` pools, with garbage in all other rows of them.

    Rows of one request (they have one block table) keep one block table, of pages scattered anew. It is `table_pages`
    wide, or as wide as the longest request of the old one's width needs.
    """
    cache, table, page = case["cache"], case["block_table"], case["cache"].shape[1]
    storage = Storage(cache.dtype is torch.uint8, (case["q_scale"], case["k_scale"]))
    longest: dict[tuple[int, ...], int] = {}
    for row, length in zip(table.tolist(), case["lengths"].tolist(), strict=True):
        longest[tuple(row)] = max(longest.get(tuple(row), 0), length)
    needed = {own: -(-length // (page * ranks)) for own, length in longest.items()}
    order = 1 + draw.permutation(sum(needed.values()) + 3)
    pools = [storage.garbage(draw, len(order) + 1, page, cache.shape[-1]) for _ in range(ranks)]
    width = table_pages or -(-table.shape[1] // ranks)
    tables = {}
    for own, count in needed.items():
        pages, order = order[:count], order[count:]
        tables[own] = torch.nn.functional.pad(pages, (0, width - count))
        keys = cache[list(own)].flatten(0, 1)[: longest[own]]
        for rank, pool in enumerate(pools):
            _write(pool, pages, keys[rank::ranks])
    return {
        **{name: value for name, value in case.items() if name != "cache"},
        **{f"cache.{rank}": pool for rank, pool in enumerate(pools)},
        "block_table": torch.stack([tables[tuple(row)] for row in table.tolist()]),
    }


def _write(pool: Tensor, pages: Tensor, keys: Tensor) -> None:
    rows = pool[pages].flatten(0, 1)
    rows[: len(keys)] = keys
    pool[pages] = rows.view(-1, *pool.shape[1:])


FAMILIES = {
    "mla_attend_dcp": ("iid_bf16", "iid_fp8", "towers_bf16", "pits_bf16", "long_fp8", "verify_bf16", "verify_fp8"),
}
