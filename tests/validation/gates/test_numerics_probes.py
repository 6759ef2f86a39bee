"""Every probe of the numerics gate passes a clean candidate and turns red for a fault that random cases may miss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_k3 import context_of
from torch import Tensor

from decode_impl.parallel.context import in_order
from numerics.contracts.roundings import split_length
from numerics.families.probes import (
    PLANTED,
    attention_grid,
    cast_cases,
    long_contexts,
    long_shards,
    same_bytes,
    sharded_grid,
)
from numerics.formats import e4m3_decode
from validation.faults.base import Fault
from validation.gates.base import GateResult
from validation.gates.numerics.gate import NumericsGate
from validation.gates.numerics.limits import virtual
from validation.gates.numerics.probes import PROBES
from validation.verdict import Verdict

SETTINGS: dict[str, Any] = {"rows": [1], "sequence_rows": [1], "shard_rows": [1], "shards": [], "seeds": 1}


def probe(name: str, op: str, *faults: Fault, seed: int = 0, replay: tuple[Any, ...] = ()) -> GateResult:
    """The gate's judgement of one probe of one op alone, or of replays alone."""
    settings = {**SETTINGS, "ops": [op], "probes": [name], "replay": list(replay)}
    gate, context = NumericsGate(), context_of(settings, faults=faults, seed=seed)
    assert gate.settings_error(settings) is None
    units = [unit for unit in gate.plan(context) if unit.params.get("probe") == name]
    units = units[: len(replay)] if replay else units
    assert all(unit.id.startswith("replay-") for unit in units) == bool(replay)
    assert units
    return gate.judge({unit.id: gate.measure(unit, context) for unit in units}, context)


def broken(op: str, mutate: Any) -> Fault:
    return Fault("test", "made up", op, (), ("specialized",), lambda ops: {op: mutate(ops[op])})


@pytest.mark.parametrize("name", PROBES)
def test_a_clean_candidate_passes(name: str) -> None:
    for op in ("kda_step", "mla_attend") if name == "captured" else PROBES[name].ops:
        result = probe(name, op)
        assert [f.message for f in result.findings] == []
        assert result.verdict is Verdict.PASS


def truncated(query: Any) -> Any:
    """FP8 values cut off instead of rounded to nearest."""

    def faulty(*, cache: Tensor, positions: Tensor, a: Tensor, k_scale: float, **rest: Any) -> Tensor:
        q: Tensor = query(cache=cache, positions=positions, a=a, k_scale=k_scale, **rest)
        row, live = cache.shape[-1], positions >= cache.shape[1]
        exact = a[:, -64:].float() * (1.0 / k_scale)
        rows = cache.view(-1, row)[positions[live], -64:]
        too_large = e4m3_decode(rows).abs() > exact[live].abs()
        cache.view(-1, row)[positions[live], -64:] = torch.where(too_large & (rows & 0x7F > 0), rows - 1, rows)
        return q

    return faulty


def one_value_wrong(query: Any) -> Any:
    """A single one of the 65,536 values is cast to the next byte."""

    def faulty(*, cache: Tensor, positions: Tensor, a: Tensor, **rest: Any) -> Tensor:
        q: Tensor = query(cache=cache, positions=positions, a=a, **rest)
        hit = (a[:, -64:] == 1.5).nonzero()
        if len(hit):
            cache.view(-1, cache.shape[-1])[positions[hit[0, 0]], cache.shape[-1] - 64 + int(hit[0, 1])] += 1
        return q

    return faulty


def forgets_the_key_before_a_page(attend: Any) -> Any:
    """The last key of the first page is skipped in contexts that end right behind it."""

    def faulty(*, cache: Tensor, lengths: Tensor, block_table: Tensor, **rest: Any) -> Tensor:
        spoiled, page = cache.clone(), cache.shape[1]
        for row in (lengths == page + 1).nonzero().flatten().tolist():
            spoiled[block_table[row, 0], page - 1] = 0
        latent: Tensor = attend(cache=spoiled, lengths=lengths, block_table=block_table, **rest)
        return latent

    return faulty


def proposes_the_first_256_only(route: Any) -> Any:
    """Experts from 256 on are never chosen."""

    def faulty(*, logits: Tensor, **rest: Any) -> Any:
        return route(logits=logits.index_fill(-1, torch.arange(256, logits.shape[-1]), -60.0), **rest)

    return faulty


def wraps_slots(step: Any) -> Any:
    """The element offset of a slot is computed in 32 bits."""

    def faulty(*, slots: Tensor, state: Tensor, **rest: Any) -> Tensor:
        offset = (slots * state[0].numel() + 2**31) % 2**32 - 2**31
        y: Tensor = step(slots=(offset // state[0].numel()).clamp(min=0), state=state, **rest)
        return y

    return faulty


def wraps_experts(experts: Any) -> Any:
    """The byte offset of an expert's weights is computed in 32 bits."""

    def faulty(*, ids: Tensor, w13: Any, **rest: Any) -> Tensor:
        size = w13.packed[0].numel()
        offset = (ids * size + 2**31) % 2**32 - 2**31
        latent: Tensor = experts(ids=(offset // size).clamp(min=0), w13=w13, **rest)
        return latent

    return faulty


def wraps_pages(attend: Any) -> Any:
    """The byte offset of a page in a rank's pool is computed in 32 bits."""

    def faulty(*, block_table: Tensor, cache: Any, **rest: Any) -> Tensor:
        size = cache[0][0].numel()
        offset = (block_table * size + 2**31) % 2**32 - 2**31
        latent: Tensor = attend(block_table=(offset // size).clamp(min=0), cache=cache, **rest)
        return latent

    return faulty


def merges_32_splits(attend: Any) -> Any:
    """The merge is one warp: partials from the 33rd on are left out."""
    merge = attend.__kwdefaults__["merge"]
    return partial(attend, merge=lambda partials, lse: merge(partials[:, :32], lse[:, :32]))


def takes_the_next_rank_for_the_owner(attend: Any) -> Any:
    """Every rank counts its keys as if it came one later: the one that owns the newest does not see it."""
    share = attend.__kwdefaults__["local_lengths"]
    return partial(attend, local_lengths=lambda lengths, rank, ranks: share(lengths, rank + 1, ranks))


def rounds_the_state(step: Any) -> Any:
    """The state is stored in BF16."""

    def faulty(*, slots: Tensor, state: Tensor, **rest: Any) -> Tensor:
        y: Tensor = step(slots=slots, state=state, **rest)
        state[slots] = state[slots].bfloat16().float()
        return y

    return faulty


@pytest.mark.parametrize(
    ("name", "op", "mutate"),
    [
        ("cast", "mla_query", truncated),
        ("cast", "mla_query", one_value_wrong),
        ("grid", "mla_attend", forgets_the_key_before_a_page),
        ("long", "mla_attend", merges_32_splits),
        ("dcp", "mla_attend_dcp", takes_the_next_rank_for_the_owner),
        ("coverage", "route", proposes_the_first_256_only),
        ("limits", "kda_step", wraps_slots),
        ("limits", "experts", wraps_experts),
        ("limits", "mla_attend_dcp", wraps_pages),
        ("drift", "kda_step", rounds_the_state),
        ("captured", "kda_step", rounds_the_state),
    ],
)
def test_its_fault_turns_it_red(name: str, op: str, mutate: Any) -> None:
    result = probe(name, op, broken(op, mutate))
    assert result.verdict is Verdict.FAIL
    assert {finding.component for finding in result.findings} == {op}
    assert all(finding.unit.startswith(f"probe-{name}-") for finding in result.findings)
    failed = result.metrics["failing_cases"]
    assert len(failed) == len({finding.unit for finding in result.findings})
    # A run of another seed measures them first, with the seed that they failed at.
    again = probe(name, op, broken(op, mutate), seed=5, replay=tuple(failed[:2]))
    assert again.metrics["failing_cases"] == failed[:2]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"probe": "cast"}, "its seed is missing"),
        ({"probe": "x", "seed": 0}, "there is no probe 'x'"),
        ({"probe": "cast", "op": "rms_norm", "rows": 64, "seed": 0}, "has no unit with these parameters"),
        ({"probe": "coverage", "op": "route", "rows": 10**9, "seed": 0}, "has no unit with these parameters"),
    ],
)
def test_a_replay_that_names_no_probe_is_explained(case: Any, reason: str) -> None:
    assert reason in (NumericsGate().settings_error({**SETTINGS, "replay": [case]}) or "")


def test_the_grid_goes_through_every_context_and_boundary() -> None:
    page, seen = 4, set()
    for case in attention_grid(page, 5, 3, 1, False, 0):
        scores = case["q"].float()[:, 0]
        for row, (length, table) in enumerate(zip(case["lengths"].tolist(), case["block_table"], strict=True)):
            keys = case["cache"][table].flatten(0, 1)[:length].float()
            seen.add((length, int((keys @ scores[row]).argmax())))
    assert {length for length, _ in seen} == set(range(1, 2 * page + 2))
    for length in range(1, 2 * page + 2):
        peaks = {peak for at, peak in seen if at == length}
        assert {0, length - 1} <= peaks
        assert {p for p in (page - 1, page, 2 * page - 1, 2 * page) if p < length} <= peaks


@pytest.mark.parametrize(("page", "table", "rows", "query"), [(4, 256, 4, 1), (64, 65, 1, 1), (4, 65, 8, 4)])
def test_long_contexts_keep_all_splits_but_the_last_alive_and_plant_keys_all_over_them(
    page: int, table: int, rows: int, query: int
) -> None:
    split, peaks, lengths = split_length(rows, table, page), set(), set()
    for case in long_contexts(page, table, rows, query, False, 0):
        for row, (length, pages) in enumerate(zip(case["lengths"].tolist(), case["block_table"], strict=True)):
            assert length > (-(-table * page // split) - 2) * split
            keys = case["cache"][pages].flatten(0, 1)[:length].float()
            peaks.add(int((keys @ case["q"][row, 0].float()).argmax()) // split)
            lengths.add(length % page)
    assert len(peaks) >= PLANTED // 2
    assert max(peaks) >= (table - 1) * page // split - 1
    assert {0, 1} <= lengths


@pytest.mark.parametrize(("rows", "query", "ranks"), [(4, 1, 2), (4, 2, 8)])
def test_long_shards_keep_all_splits_of_every_rank_alive(rows: int, query: int, ranks: int) -> None:
    split = split_length(rows, 256, 1)
    for case in long_shards(1, 256, rows, query, False, ranks, 0):
        assert case["block_table"].shape == (rows, 256)
        for length in case["lengths"].tolist():
            assert min(length // ranks, 256) > (256 // split - 1) * split


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_sharded_grid_goes_through_every_context_and_plants_keys_at_pages_splits_and_turns_of_the_owners(
    ranks: int,
) -> None:
    page, seen = 1, set()
    tokens, split = page * ranks, 4 * page * ranks
    for case in sharded_grid(page, 6, 4, 1, False, ranks, 0):
        pools = [case[f"cache.{rank}"] for rank in range(ranks)]
        for row, (length, table) in enumerate(zip(case["lengths"].tolist(), case["block_table"], strict=True)):
            keys = in_order([pool[table].flatten(0, 1) for pool in pools])[:length].float()
            seen.add((length, int((keys @ case["q"][row, 0].float()).argmax())))
    assert {length for length, _ in seen} == set(range(1, split + tokens + 2))
    for length in range(1, split + tokens + 2):
        wanted = {0, length - 1, ranks - 1, ranks, length - ranks - 1, length - ranks, tokens - 1, tokens}
        wanted |= {split - 1, split, split + tokens - 1, split + tokens}
        assert {p for p in wanted if 0 <= p < length} <= {peak for at, peak in seen if at == length}


def test_the_cast_table_holds_every_bf16_value_once() -> None:
    values = torch.cat([case["a"][:, -64:].flatten() for case, _ in cast_cases(3)])
    assert values.view(torch.int16).unique().numel() == 2**16 == values.numel()
    assert same_bytes(
        torch.tensor([0x7F, 1], dtype=torch.uint8), torch.tensor([0xFF, 2], dtype=torch.uint8)
    ).tolist() == [
        True,
        False,
    ]


def test_address_space_beyond_the_machine_s_memory_reads_as_zeros_and_takes_writes() -> None:
    pool = virtual((2**16, 2**20), torch.float32)
    assert pool.numel() * 4 == 2**38
    pool[-1, -1] = 3.0
    assert (float(pool[-1, -1]), float(pool[-2, -1])) == (3.0, 0.0)


def test_a_target_that_cannot_be_captured_from_has_no_captured_units() -> None:
    context = context_of({**SETTINGS, "probes": ["captured"]})

    class Bare:
        """Only runs ops."""

        capabilities: frozenset[Any] = frozenset()

    from dataclasses import replace

    units = NumericsGate().plan(replace(context, target=Bare()))  # type: ignore[arg-type]
    assert not [unit for unit in units if unit.params.get("probe") == "captured"]
