"""Cases for probes: the whole E4M3 cast, every small attention, and long runs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from numerics.contracts.roundings import split_length
from numerics.families import kda
from numerics.families.constants import SCALES
from numerics.families.dims import Dims
from numerics.families.draw import Draw
from numerics.families.mla import PEAK_SCORE, Storage
from numerics.families.mla_dcp import sharded
from numerics.formats import E4M3_NAN, e4m3_encode

CAST_ROWS = 64
PLANTED = 16
"""Keys of a long context that are planted one by one, at most; there may be 64 splits, and each is a row more."""
Q_SCALE, K_SCALE = SCALES[0]
GRID = {"num_attention_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 16}


def cast_cases(seed: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Cases of `mla_query` whose cache writes cast every BF16 value to E4M3, with the bytes that must come out.

    The last 64 elements of a latent row are cast as they come. Yields (case, bytes [rows, 64]); a NaN may have either
    sign. The contract multiplies by the reciprocal of the scale in FP32, saturates and rounds to nearest even.
    """
    draw, width, C, r = Draw("cast", seed), 64, 32, 32
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, CAST_ROWS, width)
    for part in every[torch.randperm(len(every), generator=draw.generator)]:
        a = torch.cat([draw.bf16(CAST_ROWS, r + C), part], -1)
        case = {
            "a": a,
            "q_norm_weight": draw.bf16(r),
            "kv_norm_weight": draw.bf16(C),
            "eps": 1e-5,
            "q_b": draw.bf16(16 + width, r, std=r**-0.5),
            "w_uk": draw.bf16(1, 16, C, std=0.25),
            "q_scale": Q_SCALE,
            "k_scale": K_SCALE,
            "cache": torch.full((CAST_ROWS // 16 + 1, 16, C + width), 0x55, dtype=torch.uint8),
            "positions": 16 + draw.permutation(CAST_ROWS),
        }
        yield case, e4m3_encode(part.float() * torch.tensor(1.0 / K_SCALE))


def same_bytes(stored: Tensor, expected: Tensor) -> Tensor:
    """Whether E4M3 bytes agree, all NaNs being alike."""
    both_nan = (stored & 0x7F == E4M3_NAN) & (expected & 0x7F == E4M3_NAN)
    agree: Tensor = (stored == expected) | both_nan
    return agree


def attention_grid(
    page: int, table_pages: int, rows: int, query_length: int, fp8: bool, seed: int
) -> Iterator[dict[str, Any]]:
    """Cases of `mla_attend` that go through every context from 1 to 2 page + 1 and every boundary within it.

    Requests have `query_length` rows, each seeing one key more. Every row has one planted key that takes nearly all of
    its softmax: the first, the last, or one at either side of a page's or a split's end. Cases hold `rows` rows; the
    last is filled up from the start of the grid.
    """
    split = split_length(rows, table_pages, page)
    peaks = [
        (start, peak) for start in range(1, 2 * page + 3 - query_length) for peak in _boundaries(start, page, split)
    ]
    requests = rows // query_length
    if not requests:
        raise ValueError(f"{rows} rows cannot hold a request of {query_length} rows")
    for first in range(0, len(peaks), requests):
        chosen = [peaks[(first + i) % len(peaks)] for i in range(requests)]
        draw = Draw(f"grid/{page}/{table_pages}/{first}", seed)
        yield _grid_case(draw, page, table_pages, 3, query_length, fp8, chosen)


def long_contexts(
    page: int, table_pages: int, rows: int, query_length: int, fp8: bool, seed: int
) -> Iterator[dict[str, Any]]:
    """Cases of `mla_attend` whose requests fill the block table, so that all splits but the last one are alive.

    Their last page holds one key, or for every other request none: the one before it then ends full. Keys are planted
    one by one: the newest, and the last ones of splits all over the context, `PLANTED` at most.
    """
    split, most = split_length(rows, table_pages, page), (table_pages - 1) * page + 1
    requests = rows // query_length
    peaks = []
    splits = range((most - 1) // split * split - 1, 0, -split)
    # The newest key in a context of either kind, then the splits'.
    for turn, end in enumerate([most - 1, most - 1, *splits[:: -(-len(splits) // (PLANTED - 2))]]):
        start = most - turn % 2 - query_length + 1
        peaks.append((start, min(end, start - 1)))
    for first in range(0, len(peaks), requests):
        chosen = [peaks[(first + i) % len(peaks)] for i in range(requests)]
        draw = Draw(f"long/{page}/{table_pages}/{first}", seed)
        yield _grid_case(draw, page, table_pages, table_pages, query_length, fp8, chosen)


def long_shards(
    page: int, table_pages: int, rows: int, query_length: int, fp8: bool, ranks: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Two cases of `long_contexts` of `mla_attend_dcp`: contexts that fill the tables of all ranks."""
    whole = long_contexts(page, table_pages * ranks, rows, query_length, fp8, seed)
    for place, case in enumerate(islice(whole, 2)):
        draw = Draw(f"long shards/{page}/{table_pages}/{ranks}/{place}", seed)
        yield sharded(draw, case, ranks, table_pages)


def sharded_grid(
    page: int, table_pages: int, rows: int, query_length: int, fp8: bool, ranks: int, seed: int
) -> Iterator[dict[str, Any]]:
    """As `attention_grid`, of `mla_attend_dcp`: every context from 1 token to a split and a page of all ranks and one
    token more.

    A planted key is the first or the last, at either side of where a page or a split of all ranks ends, or the oldest
    that is some rank's newest, and the one before it: whose rank then has a key less.
    """
    split = split_length(rows, table_pages, page) * ranks
    longest = split + page * ranks + 1
    peaks = [
        (start, peak)
        for start in range(1, longest + 2 - query_length)
        for peak in sorted({*_boundaries(start, page * ranks, split), *_turns(start, ranks)})
    ]
    requests = rows // query_length
    for first in range(0, len(peaks), requests):
        chosen = [peaks[(first + i) % len(peaks)] for i in range(requests)]
        draw = Draw(f"sharded grid/{page}/{table_pages}/{ranks}/{first}", seed)
        held = -(-longest // page)
        yield sharded(draw, _grid_case(draw, page, held, held, query_length, fp8, chosen), ranks, table_pages)


def _turns(length: int, ranks: int) -> set[int]:
    return {place for place in (length - ranks - 1, length - ranks, ranks - 1, ranks) if 0 <= place < length}


def _boundaries(length: int, page: int, split: int) -> list[int]:
    ends = {0, length - 1} | {
        edge + side for size in (page, split) for edge in range(size, length, size) for side in (-1, 0)
    }
    return sorted(ends)


def _grid_case(
    draw: Draw,
    page: int,
    table_pages: int,
    held: int,
    query_length: int,
    fp8: bool,
    requests: list[tuple[int, int]],
) -> dict[str, Any]:
    """One case; `held`: pages that a request has, used or not."""
    storage, C, row = Storage(fp8, SCALES[0]), GRID["kv_lora_rank"], GRID["kv_lora_rank"] + GRID["qk_rope_head_dim"]
    pages = 1 + held * len(requests)
    cache = storage.garbage(draw, pages, page, row)
    order = 1 + draw.permutation(pages - 1)
    table = torch.zeros(len(requests), table_pages, dtype=torch.int64)
    q = draw.normal(len(requests), query_length, row)
    softmax_scale = row**-0.5
    for request, (start, peak) in enumerate(requests):
        length = start + query_length - 1
        own = order[request * held : request * held + -(-length // page)]
        table[request, : len(own)] = own
        keys = draw.normal(length, row)
        for t in range(query_length):
            # The first row's peak is the grid's; the others take the newest key that they see.
            place = peak if t == 0 else start + t - 1
            keys[place] = q[request, t] * (PEAK_SCORE / softmax_scale / float(q[request, t].square().sum()))
        rows = cache[own].flatten(0, 1)
        rows[:length] = storage.store(keys, "k_scale")
        cache[own] = rows.view(-1, page, row)
    lengths = torch.tensor([start + t for start, _ in requests for t in range(query_length)])
    return {
        "q": storage.store(q, "q_scale").flatten(0, 1)[:, None],
        "cache": cache,
        "block_table": table.repeat_interleave(query_length, 0),
        "lengths": lengths,
        "softmax_scale": softmax_scale,
        "q_scale": Q_SCALE,
        "k_scale": K_SCALE,
        "kv_rank": C,
    }


def long_run(dims: Dims, family: str, rows: int, steps: int, seed: int) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """A `kda_step` case whose slots are empty, and the projections of `steps` steps one after the other."""
    draw = Draw(f"long_run/{family}", seed)
    stream = kda.stream_of(draw, dims, family, rows)
    D = stream.h * stream.d
    case = {
        **stream.weights,
        "conv_state": torch.zeros(rows + 1, 3 * D, 3, dtype=torch.bfloat16),
        "state": torch.zeros(rows + 1, stream.h, stream.d, stream.d),
        "slots": 1 + draw.permutation(rows),
    }
    return case, (stream.tokens(draw, rows) for _ in range(steps))
