"""The numerics gate passes a clean candidate, turns red for every fault it can see, and never passes on nothing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_k3 import SMALL_K3, context_of, judged
from torch import Tensor

from decode_impl.random_weights import random_checkpoint
from numerics.families import FAMILIES
from validation.faults.base import Fault, Ops
from validation.faults.catalogue import FAULTS
from validation.gates.base import GateResult
from validation.gates.numerics.gate import NumericsGate
from validation.gates.numerics.judge import ROUTER_SCORE_ULPS, ROUTER_WEIGHT_FLOOR
from validation.records.record import gate_doc
from validation.targets.base import ArmConfig, Capability
from validation.targets.builtin import BuiltinTarget
from validation.targets.builtin_arm import BuiltinArm
from validation.verdict import Verdict

SETTINGS: dict[str, Any] = {
    "rows": [1, 8],
    "sequence_rows": [17],
    "shard_rows": [2],
    "shards": [],
    "seeds": 1,
    "verify_rows": [2],
    "families": "in turn for large batches",
}


def run(op: str, *faults: Fault, seed: int = 0, **settings: Any) -> GateResult:
    """The gate's judgement of one op."""
    return judged(NumericsGate(), context_of({**SETTINGS, "ops": [op], **settings}, faults=faults, seed=seed))


def one_op(op: str, mutate: Any, path: str = "specialized") -> Fault:
    """A fault outside the catalogue: `mutate` turns one path's op into another."""
    return Fault(f"test-{op}", "made up", op, (), (path,), lambda ops: {op: mutate(ops[op])})


@pytest.mark.parametrize("seed", [0, 1])
def test_a_clean_candidate_passes_on_every_op(seed: int) -> None:
    result = judged(NumericsGate(), context_of({**SETTINGS, "rows": [2], "families": "all"}, seed=seed))
    assert [finding.message for finding in result.findings] == []
    assert result.verdict is Verdict.PASS
    assert result.metrics["cases"] == sum(map(len, FAMILIES.values()))
    assert result.metrics["worst"].keys() == FAMILIES.keys()
    assert all(worst["ratio"] <= 1 for worst in result.metrics["worst"].values())


def test_a_clean_candidate_passes_at_a_true_shard_width_with_families_in_turn() -> None:
    result = run("mla_attend", rows=[1], shards=["k3_shard_16"])
    assert result.verdict is Verdict.PASS
    assert result.metrics["cases"] == len(FAMILIES["mla_attend"]) + 3


def test_families_take_turns_so_that_seeds_cover_them_all() -> None:
    seen = set()
    for seed in range(len(FAMILIES["rms_norm"])):
        context = context_of({**SETTINGS, "ops": ["rms_norm"], "rows": [2], "families": "in turn"}, seed=seed)
        measured = NumericsGate().measure(NumericsGate().plan(context)[0], context)
        families = [case["family"] for case in measured["cases"]]
        assert len(families) == 2
        assert families[0] == "iid"
        seen.add(families[1])
    assert seen == set(FAMILIES["rms_norm"]) - {"iid"}


@pytest.mark.parametrize(
    "fault_id", ["kda-beta-bf16", "kda-delta-dropped", "mla-lse-base", "moe-logits-bf16", "reduce-stale-rank"]
)
def test_a_fault_turns_the_gate_red_and_is_named_by_its_op(fault_id: str) -> None:
    fault = FAULTS[fault_id]
    result = run(fault.component, fault, rows=[8])
    assert result.verdict is Verdict.FAIL
    assert {finding.component for finding in result.findings} == {fault.component}
    assert fault.component in result.summary
    assert all(finding.unit.startswith(f"{fault.component}-model-n") for finding in result.findings)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_element_that_is_not_finite_fails(value: float) -> None:
    def mutate(op: Any) -> Any:
        def faulty(**case: Any) -> Tensor:
            y: Tensor = op(**case).clone()
            y[-1, -1] = value
            return y

        return faulty

    result = run("projection", one_op("projection", mutate), rows=[2])
    assert result.verdict is Verdict.FAIL
    assert "RMSE of y is inf > allowed" in result.findings[0].message
    assert "a multiple of inf would pass" in result.findings[0].message
    assert any("1 of 640 elements of y of the candidate lie outside its contract" in f.message for f in result.findings)
    gate_doc(NumericsGate(), result, required=True, units=[])


@pytest.mark.parametrize(("op", "wider"), [("projection", torch.float32), ("moe_front", torch.float64)])
def test_right_values_in_another_format_than_the_contract_names_fail(op: str, wider: torch.dtype) -> None:
    def mutate(right: Any) -> Any:
        def faulty(**case: Any) -> Any:
            result = right(**case)
            return (result[0].to(wider), *result[1:]) if isinstance(result, tuple) else result.to(wider)

        return faulty

    result = run(op, one_op(op, mutate), rows=[2])
    assert result.verdict is Verdict.FAIL
    assert {"outputs in their formats"} == {f.message.split("'")[1] for f in result.findings}


def in_static_memory(right: Any) -> Any:
    """The op gives the same memory back at every call of one shape, as a captured graph does."""
    memory: dict[Any, Tensor] = {}

    def op(**case: Any) -> Tensor:
        y = right(**case)
        kept: Tensor = memory.setdefault(y.shape, torch.empty_like(y))
        return kept.copy_(y)

    return op


def test_an_op_that_gives_the_same_memory_back_is_judged_by_what_was_in_it() -> None:
    def every_other_call(right: Any) -> Any:
        calls = itertools.count()
        return lambda **case: right(**case) * (1.0 + 2.0**-7 * (next(calls) % 2))

    assert run("rms_norm", one_op("rms_norm", in_static_memory), rows=[2]).verdict is Verdict.PASS
    wrong = one_op("rms_norm", lambda right: in_static_memory(every_other_call(right)))
    messages = [finding.message for finding in run("rms_norm", wrong, rows=[2]).findings]
    assert any("'same bits twice' of the candidate is broken" in message for message in messages)


def test_an_input_that_is_changed_where_its_rows_have_gaps_alone_fails() -> None:
    def mutate(right: Any) -> Any:
        def faulty(*, x: Tensor, **rest: Any) -> Tensor:
            y: Tensor = right(x=x, **rest)
            if not x.is_contiguous():
                x.zero_()
            return y

        return faulty

    result = run("rms_norm", one_op("rms_norm", mutate), rows=[2])
    assert any("'inputs unchanged' of the candidate" in finding.message for finding in result.findings)


@pytest.mark.parametrize("weights", [(2.0, -1.0), (math.nan, 0.5)])
def test_routing_weights_that_are_wrong_or_nan_fail(weights: tuple[float, float]) -> None:
    def mutate(op: Any) -> Any:
        def faulty(**case: Any) -> tuple[Tensor, Tensor]:
            ids, right = op(**case)
            return ids, torch.tensor(weights).expand_as(right).clone()

        return faulty

    result = run("route", one_op("route", mutate), rows=[2])
    assert result.verdict is Verdict.FAIL
    assert any("relative error of the routing weights" in finding.message for finding in result.findings)
    assert any("weights of the candidate lie outside its contract" in finding.message for finding in result.findings)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 0], "2 rows of the candidate have ids twice or out of range"),
        ([0, 4], "2 rows of the candidate have ids twice or out of range"),
        ([-1, 0], "2 rows of the candidate have ids twice or out of range"),
    ],
)
def test_a_malformed_choice_of_experts_fails(ids: list[int], message: str) -> None:
    def mutate(op: Any) -> Any:
        return lambda **case: (torch.tensor([ids, ids]), op(**case)[1])

    result = run("route", one_op("route", mutate), rows=[2])
    assert result.verdict is Verdict.FAIL
    assert any(message in finding.message for finding in result.findings)


def test_the_worst_expert_instead_of_the_best_fails() -> None:
    def mutate(op: Any) -> Any:
        return lambda *, logits, bias, **case: op(logits=-logits, bias=-bias, **case)

    result = run("route", one_op("route", mutate), rows=[8])
    assert result.verdict is Verdict.FAIL
    assert any("the candidate left out an expert better by" in finding.message for finding in result.findings)


def _halved(op: Any) -> Any:
    return lambda **case: op(**case) * 0.5


def _bf16_logits(op: Any) -> Any:
    def faulty(**case: Any) -> tuple[Tensor, Tensor]:
        logits, z = op(**case)
        return logits.bfloat16().float(), z

    return faulty


def _biased_weights(op: Any) -> Any:
    biased: Ops = FAULTS["moe-bias-in-weights"].mutate({"route": op})
    return biased["route"]


@pytest.mark.parametrize(
    ("op", "mutate", "message"),
    [
        ("projection", _halved, "elements of y of the baseline lie outside its contract"),
        ("moe_front", _bf16_logits, "elements of logits of the baseline lie outside its contract"),
        ("route", _biased_weights, "the baseline's routing weights err by"),
    ],
)
def test_a_baseline_off_its_own_contract_fails_although_the_candidate_shares_its_error(
    op: str, mutate: Any, message: str
) -> None:
    broken = Fault("both", "made up", op, (), ("generic", "specialized"), lambda ops: {op: mutate(ops[op])})

    class BrokenTarget(BuiltinTarget):
        """A target whose both paths have the same wrong op."""

        def open(self, config: ArmConfig) -> BuiltinArm:
            return super().open(replace(config, faults=(broken,)))

    target = BrokenTarget(random_checkpoint(SMALL_K3, seed=5), None)
    settings = {**SETTINGS, "ops": [op], "rows": [4]}
    result = judged(NumericsGate(), context_of(settings, target=target))
    assert result.verdict is Verdict.FAIL
    assert any(message in finding.message for finding in result.findings)


def output(**changes: float) -> dict[str, float]:
    """Figures of one output, just inside every allowance, with changes."""
    figures = {"count": 1, "reference_rms": 1.0, "nonfinite": 0, "bias": 0.0, "baseline_bias": 0.0}
    errors = {"rmse": 2.5, "baseline_rmse": 1.0, "floor_rms": 0.5, "max": 25.0, "baseline_max": 10.0, "floor_max": 5.0}
    return {**figures, **{name: value * 2.0**-10 for name, value in errors.items()}, **changes}


def result_of(
    op: str = "projection",
    outputs: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    contracts: dict[str, Any] | None = None,
    compliance: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """A hand-made measurement of one unit with one case."""
    case = {
        "family": "iid",
        "seed": 0,
        "outputs": {"y": output()} if outputs is None else outputs,
        "histograms": {},
        "router": router,
        "compliance": compliance or {},
        "contracts": contracts or {"baseline": {}, "candidate": {}},
    }
    return {"unit": {"op": op, "width": "model", "rows": 1, "cases": [case]}}


def judge(results: dict[str, dict[str, Any]]) -> GateResult:
    return NumericsGate().judge(results, context_of(SETTINGS))


def test_errors_at_their_allowance_pass_and_just_above_it_fail_with_the_multiple_that_would_pass() -> None:
    assert judge(result_of()).verdict is Verdict.PASS
    for name, allowed in (("rmse", 2.5 * 2.0**-10), ("max", 25 * 2.0**-10)):
        result = judge(result_of(outputs={"y": output(**{name: math.nextafter(allowed, 1)})}))
        assert result.verdict is Verdict.FAIL
        assert len(result.findings) == 1
    result = judge(result_of(outputs={"y": output(rmse=6.5 * 2.0**-10)}))
    assert result.findings[0].message == (
        "projection, model width, 1 rows, family iid, seed 0: "
        "RMSE of y is 0.00635 > allowed 0.00244 (a multiple of 6 would pass)"
    )
    assert result.metrics["worst"]["projection"]["required_multiple"] == 6.0


@pytest.mark.parametrize("name", ["rmse", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_not_finite_fail_in_either_arm(name: str, value: float) -> None:
    assert judge(result_of(outputs={"y": output(**{name: value})})).verdict is Verdict.FAIL
    assert judge(result_of(outputs={"y": output(**{f"baseline_{name}": value})})).verdict is Verdict.FAIL


def router(**candidate: float) -> dict[str, Any]:
    """A hand-made judgement of both arms' routing."""
    right = {"rows": 1, "malformed": 0, "violation_ulps": 0.0, "order_ulps": 0.0, "weight_error": 0.0}
    return {"baseline": right, "candidate": {**right, **candidate}}


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"violation_ulps": ROUTER_SCORE_ULPS}, Verdict.PASS),
        ({"violation_ulps": ROUTER_SCORE_ULPS + 1}, Verdict.FAIL),
        ({"violation_ulps": math.inf, "malformed": 1}, Verdict.FAIL),
        ({"order_ulps": ROUTER_SCORE_ULPS}, Verdict.PASS),
        ({"order_ulps": ROUTER_SCORE_ULPS + 1}, Verdict.FAIL),
        ({"weight_error": ROUTER_WEIGHT_FLOOR}, Verdict.PASS),
        ({"weight_error": 2 * ROUTER_WEIGHT_FLOOR}, Verdict.FAIL),
        ({"weight_error": math.inf}, Verdict.FAIL),
    ],
)
def test_the_router_is_judged_by_sets_and_weights(figures: dict[str, float], verdict: Verdict) -> None:
    result = judge(result_of("route", {}, router(**figures)))
    assert result.verdict is verdict
    shown = result.metrics["worst"]["route"]["ratio"]
    assert shown == figures.get("weight_error", 0.0) / ROUTER_WEIGHT_FLOOR


@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_one_element_outside_its_contract_fails_with_error_bound_and_the_factor_that_would_pass(arm: str) -> None:
    figures = {"count": 9, "outside": 0, "pinned": 0.5, "used": 1.0, "error": 2e-3, "bound": 1e-6}
    assert judge(result_of(compliance={arm: {"y": figures}})).verdict is Verdict.PASS
    result = judge(result_of(compliance={arm: {"y": {**figures, "outside": 1, "used": 40.0}}}))
    assert result.verdict is Verdict.FAIL
    assert [f.message.split(": ", 1)[1] for f in result.findings] == [
        f"1 of 9 elements of y of the {arm} lie outside its contract: 0.002 from the exact result of its own "
        "roundings, FP32 arithmetic explains 1e-06 before the last one (40 times that bound would pass)"
    ]


@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_a_broken_contract_fails_and_its_elements_are_counted(arm: str) -> None:
    contracts: dict[str, Any] = {"baseline": {}, "candidate": {}}
    contracts[arm] = {"same bits twice": 3, "poison ignored": 0}
    result = judge(result_of(contracts=contracts))
    assert result.verdict is Verdict.FAIL
    assert [f.message.split(": ", 1)[1] for f in result.findings] == [
        f"contract 'same bits twice' of the {arm} is broken in 3 elements"
    ]
    assert result.tables[0].rows[0][-1] == 3


def test_a_better_candidate_fails_the_contract_that_it_does_not_follow() -> None:
    """Deliberate: a rounding left out where the contract has one is a change that nobody declared."""

    def mutate(op: Any) -> Any:
        def better(*, latent: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
            value = torch.einsum("nhc,hcv->nhv", latent.double(), w_uv.double()).flatten(1)
            return (value * torch.sigmoid(gate.double())).bfloat16()

        return better

    result = run("mla_value", one_op("mla_value", mutate), rows=[8])
    assert result.verdict is Verdict.FAIL
    assert all("lie outside its contract" in finding.message for finding in result.findings)
    assert (
        result.metrics["worst"]["mla_value"]["ratio"]
        < run("mla_value", rows=[8]).metrics["worst"]["mla_value"]["ratio"]
    )


def test_nothing_measured_is_no_pass() -> None:
    assert judge({}).verdict is Verdict.FAIL
    empty = result_of()
    empty["unit"]["cases"] = []
    assert judge(empty).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": []}, "rows is [], a list of different integers from 1 to 64 is needed"),
        ({"rows": [0]}, "rows is [0]"),
        ({"rows": [65]}, "rows is [65]"),
        ({"rows": [2, 2]}, "rows is [2, 2]"),
        ({"rows": [True]}, "rows is [True]"),
        ({"rows": 1}, "rows is 1"),
        ({"sequence_rows": [513]}, "integers from 1 to 512"),
        ({"seeds": 0}, "seeds is 0, 1 to"),
        ({"seeds": 1.0}, "seeds is 1.0"),
        (
            {"shards": ["k3_shard_4"]},
            "a list of different names, k3_shard_16, k3_shard_8, narrow_16, narrow_8, is needed",
        ),
        ({"shards": [["k3_shard_8"]]}, "shards is [['k3_shard_8']]"),
        ({"ops": ["kda"]}, "ops is ['kda'], a list of different names, at least 1 of all_reduce"),
        ({"ops": []}, "ops is []"),
        ({"ops": ["route", "route"]}, "ops is ['route', 'route']"),
        ({"ops": [{}]}, "ops is [{}]"),
        ({"families": "few"}, "families is 'few', one of 'all', 'in turn', 'in turn for large batches' is needed"),
        ({"probes": ["x"]}, "a list of different names, captured, cast"),
        ({"verify_widths": [9]}, "integers from 2 to 8"),
        ({"row": [1]}, "unknown setting 'row' (allowed: rows, sequence_rows"),
    ],
)
def test_settings_that_cannot_be_are_explained(change: dict[str, Any], reason: str) -> None:
    assert reason in (NumericsGate().settings_error({**SETTINGS, **change}) or "")


def test_all_wrong_settings_are_named_at_once() -> None:
    error = NumericsGate().settings_error({"rows": [0], "seeds": 0, "shards": []}) or ""
    for part in ("'sequence_rows' is missing", "'shard_rows' is missing", "rows is [0]", "seeds is 0"):
        assert part in error
    assert NumericsGate().settings_error(SETTINGS) is None


def test_the_plan_covers_every_op_at_every_width_and_sequences_at_the_model_s_own() -> None:
    settings = {**SETTINGS, "shards": ["narrow_8", "k3_shard_8"], "shard_rows": [1, 2]}
    units = NumericsGate().plan(context_of(settings))
    assert {unit.params["op"] for unit in units} == FAMILIES.keys()
    assert len({unit.id for unit in units}) == len(units)
    for width in settings["shards"]:
        at_width = {unit.params["op"] for unit in units if unit.params["width"] == width}
        assert at_width == FAMILIES.keys() - {"kda_sequence", "mla_attend_sequence"}
    assert NumericsGate.needs == {Capability.RUN_OP}


def test_verify_steps_are_planned_at_every_width_up_to_64_rows_in_all() -> None:
    settings = {**SETTINGS, "ops": ["kda_verify"], "verify_rows": [1, 8, 16], "verify_widths": [2, 4, 8]}

    def steps(families: str, seed: int = 0) -> set[tuple[int, int]]:
        units = NumericsGate().plan(context_of({**settings, "families": families}, seed=seed))
        return {(unit.params["rows"], unit.params["verify_width"]) for unit in units}

    every = {(1, 2), (1, 4), (1, 8), (8, 2), (8, 4), (8, 8), (16, 2), (16, 4)}
    assert steps("all") == every
    in_turn = [steps("in turn for large batches", seed) for seed in range(6)]
    assert all({width for _, width in one} == {2, 4, 8} and len(one) == 3 for one in in_turn)
    assert set.union(*in_turn) == every


def test_a_failing_case_is_listed_in_the_metrics_and_is_measured_first_when_given_back() -> None:
    fault = one_op("projection", lambda op: lambda **case: op(**case) * 1.01)
    failed = run("projection", fault, rows=[2]).metrics["failing_cases"]
    assert failed[0] == {"op": "projection", "width": "model", "rows": 2, "family": "iid", "seed": 0}
    settings = {**SETTINGS, "ops": ["projection"], "rows": [1], "replay": failed[:1]}
    context = context_of(settings, faults=(fault,))
    assert NumericsGate().settings_error(settings) is None
    first = NumericsGate().plan(context)[0]
    assert first.id == "replay-000-projection-iid"
    again = NumericsGate().judge({first.id: NumericsGate().measure(first, context)}, context)
    assert again.metrics["failing_cases"] == failed[:1]


def test_a_clean_run_lists_no_failing_case() -> None:
    assert run("rms_norm").metrics["failing_cases"] == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("x", "each case needs op, width"),
        ({"op": "projection"}, "each case needs op, width"),
        ({"op": "mla", "width": "model", "rows": 1, "family": "iid", "seed": 0}, "no family 'iid' of op 'mla'"),
        ({"op": "projection", "width": "model", "rows": 1, "family": "x", "seed": 0}, "no family 'x'"),
        ({"op": "projection", "width": "wide", "rows": 1, "family": "iid", "seed": 0}, "no width 'wide'"),
        ({"op": "projection", "width": "model", "rows": 0, "family": "iid", "seed": 0}, "rows must be 1 to 512"),
        ({"op": "projection", "width": "model", "rows": 1, "family": "iid", "seed": 0, "a": 1}, "a case has no a"),
        ({"op": "kda_verify", "width": "model", "rows": 1, "family": "iid", "seed": 0}, "kda_verify alone"),
    ],
)
def test_a_replay_that_names_no_case_is_explained(case: Any, reason: str) -> None:
    assert reason in (NumericsGate().settings_error({**SETTINGS, "replay": [case]}) or "")


def test_settings_that_leave_an_op_without_a_unit_are_refused_with_its_name() -> None:
    lost = {**SETTINGS, "verify_rows": [32], "verify_widths": [8], "shape_rows": [1], "probes": []}
    error = NumericsGate().settings_error(lost) or ""
    assert error.startswith("no unit would measure kda_verify: none of verify_rows [32]")
    assert "\n" not in error
    for kept in ({"verify_rows": [8]}, {"verify_steps": [[8, 8]]}, {"shape_rows": [1, 16]}, {"ops": ["kda_step"]}):
        assert NumericsGate().settings_error({**lost, **kept}) is None


@pytest.mark.parametrize("steps", [[[9, 8]], [[4, 9]], [[4]], [[0, 4]], [[4, 4], [4, 4]], "4x8", [[True, 4]]])
def test_a_verify_step_that_no_bin_holds_is_refused(steps: Any) -> None:
    assert "verify_steps is" in (NumericsGate().settings_error({**SETTINGS, "verify_steps": steps}) or "")


def test_named_verify_steps_come_whatever_the_seed() -> None:
    for seed in range(4):
        settings = {**SETTINGS, "ops": ["kda_verify"], "verify_steps": [[8, 8], [16, 4]], "families": "in turn"}
        ids = {unit.id for unit in NumericsGate().plan(context_of(settings, seed=seed))}
        assert {"kda_verify-model-n8-w8", "kda_verify-model-n16-w4"} <= ids
