"""Every claim that a fault is equivalent is run: the variant gives what the right one gives, bit for bit or exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_k3 import small_target

from numerics.families import FAMILIES, MINI, make_case
from numerics.formats import E4M3_NAN, e4m3_decode, e4m3_encode
from numerics.oracles import ORACLES, written
from validation.faults.catalogue import FAULTS
from validation.targets.base import ArmConfig
from validation.targets.schedule import Abort, Run, Schedule, Submit

EQUIVALENT = {fault.id: fault for fault in FAULTS.values() if fault.equivalent}


def arm(*faults: Any) -> Any:
    config = ArmConfig("candidate", "latency_specialized", kv_cache_dtype="fp8", max_batch=2, faults=faults)
    return small_target().open(config)


def cases(op: str, *families: str) -> list[dict[str, Any]]:
    return [make_case(op, MINI, family, 8, seed) for family in families or FAMILIES[op] for seed in range(2)]


def error(op: str, case: dict[str, Any], outputs: dict[str, torch.Tensor], name: str) -> float:
    """RMS distance from the exact result."""
    return float((outputs[name].double() - ORACLES[op](case)[name]).square().mean().sqrt())


def test_every_equivalent_fault_has_its_proof_here() -> None:
    assert EQUIVALENT.keys() == {
        "moe-ties-to-higher-id",
        "moe-expert-order-sum",
        "attn-res-blocks-reversed",
        "plan-one-token-prompt-decodes",
        "spec-accepted-count-kept",
        "long-kv-requantised",
    }


FP64_SUM = 64 * 2.0**-52
"""Relative distance of two orders of one FP64 sum: of its few terms (8 slots, 8 sources) every addition rounds by
2^-53, and what is cancelled between them multiplies that by less than a hundred in these cases."""

SIGMOID_BITS = 4 * 2.0**-24
"""Scores near 1 that a library's sigmoid, one ULP either way in each of two calls, lets change places in FP32."""


def test_experts_that_tie_exactly_have_the_same_scores() -> None:
    fault = EQUIVALENT["moe-ties-to-higher-id"]
    for case in cases("route"):
        right, wrong = (a.run_op("route", case) for a in (arm(), arm(fault)))
        ranking = torch.sigmoid(case["logits"].double()).float() + case["bias"]
        chosen = [ranking.gather(-1, outputs["ids"]).sort(-1).values for outputs in (right, wrong)]
        # Where a library's sigmoid differs in its last bit, scores a bit apart may change places.
        torch.testing.assert_close(chosen[0], chosen[1], rtol=SIGMOID_BITS, atol=SIGMOID_BITS)
    ties = make_case("route", MINI, "exact_ties", 8, 0)
    assert not torch.equal(arm().run_op("route", ties)["ids"], arm(fault).run_op("route", ties)["ids"])


def test_slots_in_another_order_sum_to_the_same_exact_result() -> None:
    fault = EQUIVALENT["moe-expert-order-sum"]
    for case in cases("experts"):
        order = case["ids"].argsort(-1)
        permuted = {**case, "ids": case["ids"].gather(-1, order), "weights": case["weights"].gather(-1, order)}
        exact, same = (ORACLES["experts"](c)["latent"] for c in (case, permuted))
        torch.testing.assert_close(same, exact, rtol=FP64_SUM, atol=FP64_SUM * float(exact.abs().max()))
        right, wrong = (error("experts", case, a.run_op("experts", case), "latent") for a in (arm(), arm(fault)))
        assert wrong <= right * 1.05


def test_a_mixture_does_not_depend_on_the_order_of_its_sources() -> None:
    fault = EQUIVALENT["attn-res-blocks-reversed"]
    for case in cases("attn_res"):
        used = case["num_blocks"]
        blocks = torch.cat([case["blocks"][:, :used].flip(1), case["blocks"][:, used:]], 1)
        exact, same = (ORACLES["attn_res"](c)["mixed"] for c in (case, {**case, "blocks": blocks}))
        torch.testing.assert_close(same, exact, rtol=FP64_SUM, atol=FP64_SUM * float(exact.abs().max()))
        right, wrong = (error("attn_res", case, a.run_op("attn_res", case), "mixed") for a in (arm(), arm(fault)))
        assert wrong <= right * 1.05 + 1e-12


def test_a_one_token_prompt_on_a_cleared_slot_is_a_decode_step() -> None:
    fault = EQUIVALENT["plan-one-token-prompt-decodes"]
    schedule = Schedule((Submit("only", (7,), (8, 9, 10)), Run()))
    right, wrong = (a.generate(schedule).traces["only"] for a in (arm(), arm(fault)))
    assert wrong.logits.argmax(-1).tolist() == right.logits.argmax(-1).tolist()
    case = make_case("kda_step", {**MINI, "kda_num_heads": 1}, "iid", 1, 0)
    pools = {name: torch.zeros_like(case[name]) for name in ("conv_state", "state")}
    slot = int(case["slots"][0])
    cleared = {key: value for key, value in {**case, **pools}.items() if key != "slots"}
    step = ORACLES["kda_step"]({**cleared, "slots": case["slots"]})
    sequence = ORACLES["kda_sequence"]({**cleared, "slot": slot})
    assert written("kda_step", case)["state"].nonzero().tolist() == [[slot]]
    for name in ("y", "conv_state", "state"):
        torch.testing.assert_close(step[name], sequence[name], rtol=FP64_SUM, atol=FP64_SUM)


def test_a_request_that_starts_at_another_column_of_a_cleared_slot_has_the_same_bits() -> None:
    fault = EQUIVALENT["spec-accepted-count-kept"]
    first = Submit("first", (7, 8, 9), tuple(range(10, 30)), (2,))
    second = Submit("second", (40, 41), tuple(range(42, 54)), (1, 3))
    schedule = Schedule((first, Run(4), Abort("first"), second, Run()), max_batch=1, drafts=3)
    right, wrong = (a.generate(schedule).traces["second"] for a in (arm(), arm(fault)))
    assert torch.equal(wrong.logits, right.logits)
    assert len(right.logits) == 12
    assert all(torch.equal(wrong.at_end[name], value) for name, value in right.at_end.items())


@pytest.mark.parametrize("fault", EQUIVALENT.values(), ids=list(EQUIVALENT))
def test_the_reason_is_given(fault: Any) -> None:
    assert len(fault.equivalent) > 40


def test_an_e4m3_row_quantised_again_with_its_scale_is_itself() -> None:
    """Every code, over scales of 24 binades: the FP32 product and quotient move a value far less than half a step."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = e4m3_decode(codes[(codes & 0x7F) != E4M3_NAN])
    for scale in torch.exp2(torch.linspace(-12, 12, 4001)):
        assert torch.equal(e4m3_decode(e4m3_encode((values * scale) * (1.0 / scale))), values)
