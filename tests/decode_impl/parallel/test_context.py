"""Decode context parallelism: every token has one owner, rows see the same keys as on one rank, rows merge to one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_impl.generic import OPS as GENERIC_OPS
from decode_impl.ops import call_on_case
from decode_impl.parallel import context
from decode_impl.specialized.emulation import OPS as SPECIALIZED_OPS
from numerics.bounds import BF16
from numerics.families import FAMILIES, MINI, Draw, make_case
from numerics.families.mla_dcp import sharded
from numerics.oracles import ORACLES

RANKS = (1, 2, 3, 4, 8, 16)
PATHS = {"generic": GENERIC_OPS, "specialised": SPECIALIZED_OPS}
each_path = pytest.mark.parametrize("ops", PATHS.values(), ids=PATHS.keys())


@pytest.mark.parametrize("ranks", RANKS)
def test_local_lengths_count_the_tokens_that_a_rank_owns_and_differ_by_at_most_one(ranks: int) -> None:
    lengths = torch.arange(3 * ranks + 2)
    shares = torch.stack([context.local_lengths(lengths, rank, ranks) for rank in range(ranks)])
    for length in lengths.tolist():
        owners = [context.owner(position, ranks) for position in range(length)]
        assert shares[:, length].tolist() == [owners.count(rank) for rank in range(ranks)]
    assert torch.equal(shares.sum(0), lengths)
    assert int((shares.amax(0) - shares.amin(0)).max()) == (1 if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_token_is_written_by_its_owner_alone_and_null_ones_by_nobody(ranks: int) -> None:
    page_size, pages = 4, [3, 1, 5]
    tokens = page_size * ranks
    flat = torch.tensor([page * tokens + offset for page in pages for offset in range(tokens)])
    local = torch.stack([context.local_positions(flat, page_size, rank, ranks) for rank in range(ranks)])
    for position, places in enumerate(local.T.tolist()):
        page, within = divmod(position // ranks, page_size)
        wanted = [0] * ranks
        wanted[context.owner(position, ranks)] = pages[page] * page_size + within
        assert places == wanted
    null = context.local_positions(torch.arange(tokens), page_size, ranks - 1, ranks)
    assert bool((null < page_size).all())


@pytest.mark.parametrize("ranks", RANKS)
def test_the_shards_of_a_request_are_put_back_in_the_order_of_its_tokens(ranks: int) -> None:
    rows = torch.arange(6 * ranks)[:, None]
    assert torch.equal(context.in_order([rows[rank::ranks] for rank in range(ranks)]), rows)


def unordered_merge(partials: Tensor, lse: Tensor) -> Tensor:
    weights = torch.softmax(lse.double() * math.log(2), dim=1)
    return (partials.double() * weights[..., None]).sum(1)


def random_partials(ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return torch.randn(3, ranks, 2, 8, generator=generator), 20 * torch.randn(3, ranks, 2, generator=generator)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("path", PATHS)
def test_the_merge_weighs_rows_by_their_base_2_log_sum_exps(path: str, ranks: int) -> None:
    partials, lse = random_partials(ranks)
    merged = part_of(path, "merge")(partials, lse)
    # exp2 of a difference of 80 at most errs by 80 u and its own 2 ULP, each sum of ranks terms by as many u.
    allowed = (80 + 4 + 3 * ranks) * 2.0**-24 * partials.abs().amax()
    assert float((merged - unordered_merge(partials, lse)).abs().max()) <= float(allowed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("empty", [(2,), (0, 2), (1, 2)])
def test_a_rank_without_keys_contributes_exactly_nothing_to_the_merge(path: str, empty: tuple[int, ...]) -> None:
    merge = part_of(path, "merge")
    partials, lse = random_partials(3)
    live = [rank for rank in range(3) if rank not in empty]
    expected = merge(partials[:, live], lse[:, live])
    lse[:, list(empty)] = context.EMPTY
    assert torch.equal(merge(partials, lse), expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_no_rank_has_keys_for_merges_to_something_finite(path: str) -> None:
    merged = part_of(path, "merge")(torch.zeros(1, 4, 1, 8), torch.full((1, 4, 1), context.EMPTY))
    assert not merged.any()


def part_of(path: str, part: str) -> Any:
    return PATHS[path]["mla_attend_dcp"].__kwdefaults__[part]


def one_key_a_channel(lengths: list[int], page: int = 4) -> dict[str, Any]:
    """A case on one rank in which every key scores the same, and has channel j of its value alone at place j."""
    most = max(lengths)
    pages = -(-most // page)
    cache = torch.zeros(1 + pages * len(lengths), page, most + 8)
    table = 1 + torch.arange(pages * len(lengths)).view(len(lengths), pages)
    cache[table] = torch.eye(pages * page, most + 8).view(pages, page, -1)
    return {
        "q": torch.zeros(len(lengths), 1, most + 8).bfloat16(),
        "cache": cache.bfloat16(),
        "block_table": table,
        "lengths": torch.tensor(lengths),
        "softmax_scale": 1.0,
        "q_scale": 1.0,
        "k_scale": 1.0,
        "kv_rank": most,
    }


@each_path
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_row_of_a_verify_step_sees_the_keys_up_to_its_own_place_in_the_whole_context(
    ops: Any, ranks: int, rows: int
) -> None:
    """Lengths 1 to 17, the rows of each request consecutive: no bound may come from a rank's own length."""
    lengths = [start + row for start in range(1, 18) for row in range(rows)]
    for part in (lengths[i : i + 64] for i in range(0, len(lengths), 64)):
        case = sharded(Draw("masks", ranks), one_key_a_channel(part), ranks)
        seen = call_on_case(ops, "mla_attend_dcp", case)["latent"][:, 0] != 0
        assert torch.equal(seen, torch.arange(max(part)) < torch.tensor(part)[:, None])


def weighted_magnitudes(case: dict[str, Any]) -> Tensor:
    """Sums over keys of weight times |value|, f64 [n, h, C]: what a relative error of every numerator may move."""
    values = case["cache"][..., : case["kv_rank"]]
    # The oracle's values are the first elements of its keys: magnitudes go in front, where the query has zeros. The
    # sign of an E4M3 byte is its topmost bit.
    magnitudes = values & 0x7F if values.dtype == torch.uint8 else values.abs()
    cache = torch.cat([magnitudes, case["cache"]], -1)
    query = torch.cat([torch.zeros_like(case["q"][..., : case["kv_rank"]]), case["q"]], -1)
    return ORACLES["mla_attend"]({**case, "cache": cache, "q": query})["latent"]


@each_path
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES["mla_attend_dcp"])
def test_attention_over_ranks_is_that_of_one_rank_within_the_roundings_of_the_numerators_and_the_result(
    ops: Any, family: str, ranks: int
) -> None:
    case = make_case("mla_attend", MINI, family, 8, ranks)
    one = call_on_case(ops, "mla_attend", case)["latent"].double()
    many = call_on_case(ops, "mla_attend_dcp", sharded(Draw(family, 0), case, ranks))["latent"].double()
    # Two results, each with numerators rounded relative to other maxima (u each) and rounded once itself.
    allowed = 2 * BF16.unit_roundoff * (weighted_magnitudes(case) + torch.maximum(one.abs(), many.abs()))
    # What FP32 adds is 2^-16 of that for each of some hundred operations at most.
    assert bool(((one - many).abs() <= (1 + 2.0**-8) * allowed).all())
    assert bool(one.any())


@pytest.mark.parametrize("family", FAMILIES["mla_attend_dcp"])
def test_one_rank_gives_the_bits_of_attention_without_context_parallelism(family: str) -> None:
    case = make_case("mla_attend", MINI, family, 8, 0)
    alone = {**{name: value for name, value in case.items() if name != "cache"}, "cache.0": case["cache"]}
    wanted = call_on_case(SPECIALIZED_OPS, "mla_attend", case)["latent"]
    assert torch.equal(call_on_case(SPECIALIZED_OPS, "mla_attend_dcp", alone)["latent"], wanted)


@each_path
def test_a_row_without_keys_is_zero_and_reads_no_rank_s_page(ops: Any) -> None:
    case = sharded(Draw("null", 0), one_key_a_channel([5, 1]), 4) | {"lengths": torch.tensor([5, 0])}
    for rank in range(4):
        case[f"cache.{rank}"][case["block_table"][1]] = torch.nan
    latent = call_on_case(ops, "mla_attend_dcp", case)["latent"]
    assert not latent[1].any()
    assert bool(latent[0].isfinite().all())


@each_path
def test_a_rank_without_heads_writes_its_share_of_the_context_all_the_same(ops: Any) -> None:
    case = make_case("mla_query", MINI, "iid_fp8", 4, 0)
    headless = {**case, "q_b": case["q_b"][:0], "w_uk": case["w_uk"][:0]}
    wanted, got = (call_on_case(ops, "mla_query", each) for each in (case, headless))
    assert got["q"].shape == (4, 0, case["cache"].shape[-1])
    assert torch.equal(got["cache"], wanted["cache"])
