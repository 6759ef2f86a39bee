"""The gate sees a kernel that is wrong at one shape and one batch bin, with one number, or for one expert alone.

Every mutant here passed a gate that had one shape at every batch bin, K3's own constants and ids below 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from small_k3 import context_of, small_target
from torch import Tensor

from numerics.families import BRANCHES, FAMILIES, MINI, Draw, make_case, shapes
from numerics.families.constants import turned
from validation.faults.base import Fault
from validation.gates.base import Context
from validation.gates.numerics.dims import Drawn, dims_of
from validation.gates.numerics.gate import NumericsGate
from validation.gates.numerics.probes import BINS
from validation.gates.numerics.units import _drawn as drawn_of
from validation.gates.numerics.units import with_defaults
from validation.mutation.measure import CAUGHT, ERROR, asked
from validation.mutation.shared import SharedTarget
from validation.profile import load_profile
from validation.targets.base import Target

Where = Callable[[Mapping[str, Any]], bool]


@cache
def shared() -> SharedTarget:
    """The small model; the baseline's results are shared between the mutants of this process."""
    return SharedTarget(small_target())


def premerge(op: str, *faults: Fault, **settings: Any) -> Context:
    """The numerics gate's settings of the premerge profile, for one op."""
    own = {**load_profile("premerge")[1].gates["numerics"], "ops": [op], **settings}
    return replace(context_of(own, faults=faults), target=cast(Target, shared()))


def caught(op: str, mutate: Any, units: str = "", **settings: Any) -> bool:
    """Whether a premerge run of one op turns red. `units`: part of the ids of those that are asked."""
    fault = Fault("mutant", "made up", op, (), ("specialized",), lambda ops: {op: mutate(ops[op])})
    context = premerge(op, fault, **settings)
    planned = [unit for unit in NumericsGate().plan(context) if units in unit.id]
    said = asked(NumericsGate(), planned, context)
    assert said["says"] != ERROR, said
    return bool(said["says"] == CAUGHT)


def wrong_where(where: Where) -> Any:
    """The first output is off by half, in the cases that `where` names."""

    def mutate(op: Any) -> Any:
        def faulty(**case: Any) -> Any:
            result = op(**case)
            outputs = result if isinstance(result, tuple) else (result,)
            if where(case):
                y = next(x for x in outputs if x.is_floating_point() or x.dtype == torch.uint8)
                y.mul_(1.5) if y.is_floating_point() else y.bitwise_xor_(8)
            return result

        return faulty

    return mutate


def heads_of(case: Mapping[str, Any]) -> int:
    return int(case["state"].shape[1])


WHERE: dict[str, tuple[str, str, Where]] = {
    "12 KDA heads at bin 16": ("kda_step", "shapes-n16", lambda c: heads_of(c) == 12),
    "6 KDA heads at bin 64": ("kda_step", "shapes-n64", lambda c: heads_of(c) == 6),
    "more than 2 heads in verify steps of 32 rows": ("kda_verify", "shapes-n32", lambda c: heads_of(c) > 2),
    "12 heads attend at 8 rows": ("mla_attend", "shapes-n8", lambda c: c["q"].shape[1] == 12),
    "12 heads attend at 32 rows": ("mla_attend", "shapes-n32", lambda c: c["q"].shape[1] == 12),
    "FP8 cache at bin 16": ("mla_attend", "model-n16", lambda c: c["q"].dtype == torch.uint8),
    "FP8 cache at bin 32": ("mla_attend", "model-n32", lambda c: c["q"].dtype == torch.uint8),
    "1,024 keys and more": ("mla_attend", "model-n1", lambda c: int(c["lengths"].max()) >= 1024),
    "12 heads query at 16 rows": ("mla_query", "shapes-n16", lambda c: c["w_uk"].shape[0] == 12),
    "wide shared expert at bin 16": ("shared_expert", "shapes-n16", lambda c: c["down"].shape[1] > 192),
    "8 ranks at bin 16": ("all_reduce", "shapes-n16", lambda c: len(c["y"]) == 8),
    "2 ranks at bin 32": ("moe_tail", "shapes-n32", lambda c: len(c["latent"]) == 2),
    "16 ranks of the output mix": ("output_mix", "shapes", lambda c: len(c["y"]) == 16),
    **{f"{n} residual blocks": ("attn_res", "shapes", lambda c, n=n: c["num_blocks"] == n) for n in (1, 4, 5, 6)},  # type: ignore[misc]
    "an expert from 32 on": ("experts", "shapes-n1", lambda c: bool((c["ids"] >= 32).any())),
    "more than 512 pairs": ("experts", "shapes-n64", lambda c: c["ids"].numel() > 512),
    "an expert from 256 on": ("experts", "shapes-n8", lambda c: bool((c["ids"] >= 256).any())),
    "more than 64 experts chosen": ("experts", "shapes-n8", lambda c: len(c["ids"].unique()) > 64),
    "a true latent of the experts": ("experts", "shapes-n1", lambda c: c["z"].shape[1] == 3584),
    "true rows of the norm at bin 64": ("rms_norm", "shapes-n64", lambda c: c["x"].shape[1] == 7168),
    "true rows of the sum over ranks": ("all_reduce", "shapes", lambda c: c["y"][0].shape[1] == 7168),
    "true sources of the mix": ("attn_res", "shapes", lambda c: c["prefix"].shape[1] == 7168),
    "a true hidden size of the output mix": ("output_mix", "shapes", lambda c: c["prefix"].shape[1] == 7168),
    "true ranks of the query at bin 64": ("mla_query", "shapes-n64", lambda c: c["q_b"].shape[1] == 1536),
    "pages of 64 written at bin 64": ("mla_query", "shapes-n64", lambda c: c["cache"].shape[1] == 64),
    "pages of 64 read by a batch": ("mla_attend", "shapes-n2", lambda c: c["cache"].shape[1] == 64),
    "a true latent over ranks": ("mla_attend_dcp", "shapes-n2", lambda c: c["kv_rank"] == 512),
    "a true latent brought back at bin 64": ("mla_value", "shapes-n64", lambda c: c["latent"].shape[2] == 512),
    "true inputs of the front at bin 64": ("moe_front", "shapes-n64", lambda c: c["x"].shape[1] == 7168),
    "a true latent of the tail": ("moe_tail", "shapes", lambda c: c["up_weight"].shape[1] == 3584),
    "true inputs of the shared expert at bin 64": ("shared_expert", "shapes-n64", lambda c: c["x"].shape[1] == 7168),
}
"""What is wrong: the op, the units that are asked, and the cases in which it is."""


@pytest.mark.parametrize("what", WHERE)
def test_a_kernel_that_is_wrong_at_one_shape_alone_turns_the_gate_red(what: str) -> None:
    op, units, where = WHERE[what]
    assert caught(op, wrong_where(where), units)


def test_an_expert_that_is_never_chosen_at_one_bin_turns_the_gate_red() -> None:
    def mutate(route: Any) -> Any:
        def faulty(*, logits: Tensor, **rest: Any) -> Any:
            if logits.shape[0] == 32:
                logits = logits.index_fill(-1, torch.tensor([logits.shape[-1] - 1]), -60.0)
            return route(logits=logits, **rest)

        return faulty

    assert caught("route", mutate, "coverage-route-n32")


NUMBERS = [
    (op, name)
    for op in FAMILIES
    for name, value in make_case(op, MINI, FAMILIES[op][-1], 1, 0).items()
    if type(value) is float
]


def test_every_op_with_plain_numbers_is_asked() -> None:
    assert {op for op, _ in NUMBERS} == set(FAMILIES) - {"projection", "all_reduce", "mla_value", "moe_front"}
    assert {name for _, name in NUMBERS} == {
        *("eps", "lower_bound", "q_scale", "k_scale", "softmax_scale", "scaling", "beta", "linear_beta")
    }


@pytest.mark.parametrize(("op", "name"), NUMBERS, ids=[f"{op}-{name}" for op, name in NUMBERS])
def test_a_number_that_is_compiled_in_turns_the_gate_red(op: str, name: str) -> None:
    """The kernel has K3's own value, or the one that the width gives, whatever it is called with."""
    compiled_in = make_case(op, MINI, FAMILIES[op][0], 1, 0)[name]
    mutate = lambda right: lambda **case: right(**{**case, name: compiled_in})  # noqa: E731
    path = "generic" if op.endswith("sequence") else "specialized"
    fault = Fault("mutant", "made up", op, (), (path,), lambda ops: {op: mutate(ops[op])})
    context = premerge(op, fault, rows=[1, 2], sequence_rows=[1, 15], shape_rows=[])
    planned = [unit for unit in NumericsGate().plan(context) if "-model-" in unit.id]
    said = asked(NumericsGate(), planned, context)
    assert said["says"] == CAUGHT, said


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_no_bin_of_an_op_has_the_numbers_of_one_model_alone(seed: int) -> None:
    """A kernel of one batch bin has K3's own numbers compiled in: some case at that bin has others."""
    context = with_defaults(replace(premerge(""), seed=seed))
    context = replace(context, settings={**context.settings, "ops": list(shapes.LEVELS), "probes": []})
    turns: dict[tuple[str, int], set[int]] = {}
    for unit in NumericsGate().plan(context):
        op = unit.params["op"]
        for drawn in drawn_of(unit, context):
            draw = Draw("", drawn.seed, FAMILIES[op].index(drawn.family))
            at = min(n for n in BINS if n >= drawn.rows * (drawn.verify_width or 1))
            turns.setdefault((op, at), set()).add(turned(draw, drawn.rows, (0, 1, 2)))
    assert turns
    assert [place for place, seen in turns.items() if seen == {0}] == []


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("op", shapes.LEVELS)
def test_every_level_is_measured_in_one_run_and_all_of_few_at_every_bin(op: str, seed: int) -> None:
    context = with_defaults(premerge(op))
    gate, seen = NumericsGate(), {n: set[tuple[str, int]]() for n in BINS}
    for unit in gate.plan(replace(context, seed=seed)):
        if unit.params.get("width") == "shapes":
            turns = range(shapes.cases(op))
            first = unit.params["place"] * len(turns) + seed * 1000
            rows = unit.params["rows"]
            seen[rows] |= {x for t in turns for x in shapes.shape(op, first + t, rows).items()}
    levels = {(name, level) for name, own in shapes.LEVELS[op].items() for level in own}
    assert levels <= set.union(*seen.values())
    few = {(n, level) for n, level in levels if len(shapes.LEVELS[op][n]) <= shapes.cases(op)}
    if op in shapes.WIDE_UP_TO:
        few = {(n, level) for n, level in few if n not in shapes.WIDTHS}
    apart = shapes.ALL_EXPERTS_AT if op == "experts" else 0
    assert all(few <= at for n, at in seen.items() if at and n != apart)


def test_a_family_does_not_stay_with_one_shape_and_is_replayed_with_its_own() -> None:
    fault = Fault("mutant", "made up", "mla_value", (), ("specialized",), lambda ops: {"mla_value": wrong(ops)})

    def wrong(ops: Any) -> Any:
        return wrong_where(lambda case: case["latent"].shape[1] == 6 and len(case["gate"]) == 4)(ops["mla_value"])

    context = premerge("mla_value", fault, rows=[1], probes=[])
    gate = NumericsGate()
    results = {unit.id: gate.measure(unit, context) for unit in gate.plan(context)}
    cases = [case for result in results.values() if result["width"] == "shapes" for case in result["cases"]]
    assert len({(case["family"], case["shape"] % 2) for case in cases}) == 2 * len(FAMILIES["mla_value"])
    judged = gate.judge(results, context)
    assert "num_attention_heads 6, " in judged.findings[0].message
    assert " width, 4 rows" in judged.findings[0].message
    [failed] = judged.metrics["failing_cases"]
    assert failed["width"] == "shapes"
    settings = {**context.settings, "replay": [failed]}
    assert gate.settings_error(settings) is None
    first = gate.plan(replace(context, settings=settings))[0]
    again = gate.judge({first.id: gate.measure(first, replace(context, settings=settings))}, context)
    assert again.metrics["failing_cases"] == [failed]


def test_ranks_and_blocks_at_the_model_s_width_change_with_family_and_seed() -> None:
    dims = [
        dims_of("model", "output_mix", Drawn(family, 16, seed), small_target())
        for seed in (0, 1000)
        for family in FAMILIES["output_mix"]
    ]
    assert {d["ranks"] for d in dims} == {1, 2, 4, 8, 16}
    assert len({d["blocks_used"] for d in dims}) == dims[0]["attn_res_blocks"]


@pytest.mark.parametrize(("op", "branch"), [(op, name) for op, names in BRANCHES.items() for name in names])
def test_every_way_through_an_op_is_measured_at_every_bin(op: str, branch: str) -> None:
    context = with_defaults(premerge(op))
    units = [unit for unit in NumericsGate().plan(context) if unit.params.get("width") == "model"]
    assert {unit.params["rows"] for unit in units if branch in {d.family for d in drawn_of(unit, context)}} >= set(BINS)
