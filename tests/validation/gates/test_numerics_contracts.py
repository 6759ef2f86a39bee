"""Every exact contract has an op that breaks it and nothing else; the specialised path breaks none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_k3 import context_of, judged
from torch import Tensor

from decode_impl.ops import call_on_case
from decode_impl.specialized import emulation
from numerics.families import FAMILIES, MINI, make_case
from numerics.formats import E4M3_NAN
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.numerics import contracts
from validation.gates.numerics.contracts import POISONS, broken_contracts
from validation.gates.numerics.gate import NumericsGate
from validation.gates.numerics.poison import garbled_cases, widened
from validation.gates.numerics.poison import poisoned as poisoned_case
from validation.verdict import Verdict

Op = Callable[..., Any]


def writes_the_null_page(query: Op) -> Op:
    """The first row of page 0, which nobody owns, is overwritten."""

    def faulty(*, cache: Tensor, **rest: Any) -> Any:
        q = query(cache=cache, **rest)
        cache[0, 0] = 1
        return q

    return faulty


def differs_when_repeated(projection: Op) -> Op:
    """Another result for the same inputs, every second time."""
    seen: list[Tensor] = []

    def faulty(*, x: Tensor, **rest: Any) -> Tensor:
        y: Tensor = projection(x=x, **rest).clone()
        if seen and torch.equal(seen[-1], x):
            y[0, 0] = one_step_up(y[0, 0])
            seen.clear()
        else:
            seen.append(x)
        return y

    return faulty


def fills_rows_without_keys(attend: Op) -> Op:
    """Padded rows hold something small instead of zero."""

    def faulty(*, lengths: Tensor, **rest: Any) -> Tensor:
        latent: Tensor = attend(lengths=lengths, **rest).clone()
        latent[lengths == 0] = 2.0**-40
        return latent

    return faulty


def fills_rows_without_slot(step: Op) -> Op:
    """Rows of slot 0 hold something small instead of zero."""

    def faulty(*, slots: Tensor, **rest: Any) -> Tensor:
        y: Tensor = step(slots=slots, **rest)
        y[slots == 0] = 2.0**-40
        return y

    return faulty


def treats_the_first_row_apart(projection: Op) -> Op:
    """The first row is rounded otherwise than the others."""

    def faulty(**case: Any) -> Tensor:
        y: Tensor = projection(**case).clone()
        y[0, 0] = one_step_up(y[0, 0])
        return y

    return faulty


def multiplies_unread_memory_by_zero(mix: Op) -> Op:
    """A block that is not in use takes part with weight zero, which a NaN survives."""

    def faulty(*, blocks: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        prefix, mixed = mix(blocks=blocks, **rest)
        return prefix, torch.where(blocks[:, -1].isnan(), blocks[:, -1], mixed)

    return faulty


def scales_by_a_maximum_over_unread_memory(mix: Op) -> Op:
    """A block that is not in use takes part in a maximum, which ignores a NaN and not a large number."""

    def faulty(*, blocks: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        prefix, mixed = mix(blocks=blocks, **rest)
        largest = torch.fmax(blocks[:, -1], torch.zeros_like(mixed)).float().amax(-1, keepdim=True)
        return prefix, torch.where(largest > 1e38, torch.zeros_like(mixed), mixed)

    return faulty


def one_step_up(x: Tensor) -> Tensor:
    """The next BF16 away from zero; a NaN stays one."""
    return torch.where(x.isnan(), x, (x.view(torch.int16) + 1).view(torch.bfloat16))


def leaves_a_row_as_it_was_allocated(reduce: Op) -> Op:
    """The last row of the output is never written."""

    def faulty(*, y: list[Tensor]) -> Tensor:
        right = reduce(y=y)
        out = torch.empty_like(right)
        out[:-1] = right[:-1]
        out[-1:] = torch.where(out[-1:].isnan(), out[-1:], right[-1:])
        return out

    return faulty


def assumes_dense_rows(projection: Op) -> Op:
    """Rows are read at multiples of their length, whatever their stride."""

    def faulty(*, x: Tensor, **rest: Any) -> Tensor:
        return projection(x=x.as_strided(x.shape, (x.shape[1], 1)), **rest)  # type: ignore[no-any-return]

    return faulty


def writes_between_the_slots(step: Op) -> Op:
    """The element behind every slot's heads is overwritten, where there is one."""

    def faulty(*, state: Tensor, **rest: Any) -> Tensor:
        y = step(state=state, **rest)
        if state.stride(0) > state[0].numel():
            behind = state.storage_offset() + state[0].numel()
            state.as_strided((state.shape[0],), (state.stride(0),), behind).fill_(1.0)
        return y  # type: ignore[no-any-return]

    return faulty


def ranks_all_rows_by_one_maximum(route: Op) -> Op:
    """Scores are shifted by the largest logit of the batch, which one NaN spoils for every row."""

    def faulty(*, logits: Tensor, **rest: Any) -> Any:
        return route(logits=logits + 0 * logits.max(), **rest)

    return faulty


def names_no_expert_for_a_nan(route: Op) -> Op:
    """A row without a largest score gets the number of experts as its ids."""

    def faulty(*, logits: Tensor, **rest: Any) -> Any:
        ids, weights = route(logits=logits, **rest)
        return torch.where(logits.isnan().any(-1, keepdim=True), logits.shape[-1], ids), weights

    return faulty


def as_if_dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes the strides of `x` for those of a dense tensor."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


def assumes_dense(name: str) -> Callable[[Op], Op]:
    """An index input is read as if it were dense."""
    return lambda op: lambda **case: op(**{**case, name: as_if_dense(case[name])})


def hides_nan(norm: Op) -> Op:
    """NaNs are taken for zeros: the row looks healthy and is not."""
    return lambda *, x, **rest: norm(x=x.nan_to_num(), **rest)


def spreads_from_row_0(norm: Op) -> Op:
    """The first row's values reach the last row with weight zero."""

    def faulty(*, x: Tensor, **rest: Any) -> Tensor:
        y: Tensor = norm(x=x, **rest).clone()
        y[-1] = torch.where(x[0].isnan(), x[0], y[-1])
        return y

    return faulty


def guards_the_last_null_row_alone(step: Op) -> Op:
    """A padded row writes the null slot unless it is the last one of the batch."""

    def faulty(*, slots: Tensor, state: Tensor, **rest: Any) -> Tensor:
        y: Tensor = step(slots=slots, state=state, **rest)
        if bool((slots[:-1] == 0).any()):
            state[0] += 1.0
        return y

    return faulty


def guards_rows_beside_live_ones_alone(step: Op) -> Op:
    """A step whose rows are all padded, which a shortcut takes, writes the null slot."""

    def faulty(*, slots: Tensor, state: Tensor, **rest: Any) -> Tensor:
        y: Tensor = step(slots=slots, state=state, **rest)
        if not slots.any():
            state[0] += 1.0
        return y

    return faulty


def takes_an_input_with_gaps_for_scratch(project: Op) -> Op:
    """A view is no copy: what a kernel leaves in it is the caller's."""

    def faulty(*, x: Tensor, **rest: Any) -> Tensor:
        y: Tensor = project(x=x, **rest)
        if not x.is_contiguous():
            x.zero_()
        return y

    return faulty


DENSE = [
    ("kda_step", "slots"),
    ("kda_verify", "sources"),
    ("kda_verify", "targets"),
    ("mla_query", "positions"),
    ("mla_attend", "block_table"),
    ("mla_attend", "lengths"),
    ("experts", "ids"),
    ("experts", "weights"),
]
"""Index inputs of ops, and the routing weights, which are views of larger tables as often as not."""

MUTANTS = [
    ("mla_query", writes_the_null_page, "unowned bytes unchanged"),
    ("projection", differs_when_repeated, "same bits twice"),
    ("mla_attend", fills_rows_without_keys, "null rows zero"),
    ("kda_step", fills_rows_without_slot, "null rows zero"),
    ("projection", treats_the_first_row_apart, "row order free"),
    ("attn_res", multiplies_unread_memory_by_zero, "poison ignored"),
    ("attn_res", scales_by_a_maximum_over_unread_memory, "poison ignored"),
    ("all_reduce", leaves_a_row_as_it_was_allocated, "outputs fully written"),
    ("projection", assumes_dense_rows, "strided views"),
    ("kda_step", writes_between_the_slots, "row padding unchanged"),
    ("route", ranks_all_rows_by_one_maximum, "rows kept apart"),
    ("route", names_no_expert_for_a_nan, "rows kept apart"),
    ("rms_norm", spreads_from_row_0, "rows kept apart"),
    ("rms_norm", hides_nan, "NaN stays NaN"),
    ("kda_step", guards_the_last_null_row_alone, "unowned bytes unchanged"),
    ("kda_step", guards_rows_beside_live_ones_alone, "unowned bytes unchanged"),
    ("projection", takes_an_input_with_gaps_for_scratch, "inputs unchanged"),
]
STATEFUL = {differs_when_repeated, leaves_a_row_as_it_was_allocated}
"""Mutants that break other contracts too: each is another call, and finds other bytes in memory."""
each_mutant = pytest.mark.parametrize(("op", "mutate", "contract"), MUTANTS, ids=[m[1].__name__ for m in MUTANTS])


def broken(op: str, mutate: Callable[[Op], Op] | None = None, rows: int = 8, family: str = "iid") -> dict[str, int]:
    """Broken elements by contract, of the specialised op or its mutant."""
    case = make_case(op, {**MINI, "kda_num_heads": 1}, family, rows, seed=0)
    right: Op = emulation.OPS[op]
    ops = {op: mutate(right) if mutate else right}
    counts = broken_contracts(op, case, lambda inputs: call_on_case(ops, op, inputs), placement=True)
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("op", emulation.OPS)
def test_the_specialised_path_breaks_no_contract_on_any_family(op: str) -> None:
    for family in FAMILIES[op]:
        assert broken(op, rows=3, family=family) == {}, family


def test_every_contract_has_a_mutant() -> None:
    case = make_case("projection", MINI, "iid", 2, seed=0)
    run = lambda inputs: call_on_case(emulation.OPS, "projection", inputs)  # noqa: E731
    counted = broken_contracts("projection", case, run, placement=True)
    assert counted.keys() == {contract for _, _, contract in MUTANTS}


@each_mutant
def test_a_mutant_breaks_exactly_its_contract(op: str, mutate: Callable[[Op], Op], contract: str) -> None:
    family = "iid_bf16" if op.startswith("mla") else "iid"
    found = broken(op, mutate, family=family).keys()
    assert contract in found if mutate in STATEFUL else found == {contract}


@each_mutant
def test_a_mutant_turns_the_gate_red_by_its_contract(op: str, mutate: Callable[[Op], Op], contract: str) -> None:
    fault = Fault("mutant", "made up", op, (), ("specialized",), lambda ops: {op: mutate(ops[op])})
    settings = {"ops": [op], "rows": [8], "sequence_rows": [17], "shard_rows": [2], "shards": [], "seeds": 1}
    result = judged(NumericsGate(), context_of(settings, faults=(fault,)))
    assert result.verdict is Verdict.FAIL
    assert any(f"contract '{contract}' of the candidate is broken in" in f.message for f in result.findings)
    assert not any("of the baseline" in f.message for f in result.findings)


BETWEEN_ROWS = {
    "kda-nan-state-hidden": "NaN stays NaN",
    "mla-nan-row-hidden": "NaN stays NaN",
    "mla-value-gate-nan-hidden": "NaN stays NaN",
    "reduce-nan-of-a-rank-hidden": "NaN stays NaN",
    "kda-nan-in-other-states": "rows kept apart",
    "mla-row-padding-zeroed": "row padding unchanged",
    "mla-pages-side-by-side": "strided views",
    "mla-value-rows-side-by-side": "strided views",
    "reduce-stride-of-first-rank": "strided views",
    "rms-norm-over-the-stride": "strided views",
}
"""Faults that show in one input alone, in what a pool holds afterwards, or in what lies between rows."""


@pytest.mark.parametrize(("fault", "contract"), BETWEEN_ROWS.items(), ids=BETWEEN_ROWS)
def test_what_one_input_brings_and_what_lies_between_rows_is_looked_at(fault: str, contract: str) -> None:
    op = FAULTS[fault].component
    family = "iid_bf16" if op in ("mla_query", "mla_attend") else "iid"
    assert broken(op, lambda right: FAULTS[fault].mutate({op: right})[op], family=family).keys() == {contract}


def test_gaps_hold_what_neither_a_read_nor_a_zero_leaves_unseen() -> None:
    case = make_case("mla_query", MINI, "iid_fp8", 4, seed=0)
    cache, a = (widened("mla_query", case)[name] for name in ("cache", "a"))
    for view, filler in (
        (cache, E4M3_NAN),
        (a.view(torch.int16), torch.tensor(float("nan")).bfloat16().view(torch.int16)),
    ):
        behind = view.as_strided((1,), (1,), view.storage_offset() + view.shape[-1])
        assert int(behind) == int(filler)
    assert torch.equal(cache, case["cache"])


@pytest.mark.parametrize(("op", "name"), DENSE, ids=[f"{op}-{name}" for op, name in DENSE])
def test_an_index_input_read_as_if_it_were_dense_breaks_strided_views(op: str, name: str) -> None:
    family = "iid_bf16" if op.startswith("mla") else "iid"
    assert "strided views" in broken(op, assumes_dense(name), family=family)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_row_is_garbled_once_and_lies_beside_a_garbled_one_once(rows: int) -> None:
    case = make_case("rms_norm", MINI, "iid", rows, seed=0)
    garbled = [which for _, which in garbled_cases("rms_norm", case)]
    assert torch.equal(garbled[0], ~garbled[1])
    assert broken("rms_norm", spreads_from_row_0, rows=rows).keys() == {"rows kept apart"}


@pytest.mark.parametrize(
    ("poison", "mutate"),
    [("NaN", multiplies_unread_memory_by_zero), ("3e38", scales_by_a_maximum_over_unread_memory)],
)
def test_each_poison_finds_what_the_other_cannot(
    poison: str, mutate: Callable[[Op], Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts, "POISONS", {poison: POISONS[poison]})
    assert broken("attn_res", mutate).keys() == {"poison ignored"}
    others = {name: value for name, value in POISONS.items() if name != poison}
    monkeypatch.setattr(contracts, "POISONS", others)
    assert broken("attn_res", mutate) == {}


def test_broken_elements_are_counted() -> None:
    case = make_case("mla_query", MINI, "iid_fp8", 2, seed=0)
    row = case["cache"].shape[-1]
    unequal = int((case["cache"][0, 0] != 1).sum())
    assert 0 < unequal <= row
    ops = {"mla_query": writes_the_null_page(emulation.OPS["mla_query"])}
    run = lambda inputs: call_on_case(ops, "mla_query", inputs)  # noqa: E731
    assert broken_contracts("mla_query", case, run, placement=True)["unowned bytes unchanged"] == unequal


def unread(case: dict[str, Any], op: str, poison: float) -> dict[str, Any]:
    poisoned = poisoned_case(op, case, poison)
    assert poisoned is not None
    return poisoned


@pytest.mark.parametrize("op", ["kda_step", "kda_sequence", "mla_attend", "mla_attend_sequence", "attn_res"])
def test_poison_reaches_memory_and_spares_what_the_op_reads(op: str) -> None:
    family = "iid_bf16" if op.startswith("mla") else "iid"
    case = make_case(op, MINI, family, 4, seed=0)
    poisoned = unread(case, op, float("nan"))
    changed = [name for name in case if poisoned[name] is not case[name]]
    assert changed
    for name in changed:
        spoiled = poisoned[name].isnan()
        assert spoiled.any(), name
        assert not spoiled.all(), name
        assert torch.equal(poisoned[name][~spoiled], case[name][~spoiled])
