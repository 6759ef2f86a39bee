"""Each input family makes the fault it is there for gross; where it matters, plain random inputs are shown not to.

Two FP64 computations of one value, in another order, differ by at most about (operations) x 2^-53 of the largest term:
from 1e-14 for a handful of operations to 1e-10 through thousands with cancellation. A wrong
formula is off by 1e-3 and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics.families import MINI, make_case
from numerics.formats import bf16, e4m3_decode, mxfp4_dequantise
from numerics.metrics import error_stats
from numerics.oracles import ORACLES, kda, route_disagreements, written


def rmse_ratio(candidate: Tensor, reference: Tensor) -> float:
    return error_stats(candidate, reference).rmse_ratio


def without_delta_term(op: str, family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """RMSE ratio of y when the recurrence writes beta v instead of beta (v - S k)."""

    def delta_rule(S: Tensor, t: kda.Token) -> tuple[Tensor, Tensor]:
        S = S * t.l.exp()[..., None, :] + (t.beta[..., None] * t.v)[..., :, None] * t.k[..., None, :]
        return S, (S * t.q[..., None, :]).sum(-1)

    case = make_case(op, MINI, family, 8, seed)
    right = ORACLES[op](case)["y"]
    with monkeypatch.context() as patch:
        patch.setattr(kda, "delta_rule", delta_rule)
        return rmse_ratio(ORACLES[op](case)["y"], right)


@pytest.mark.parametrize("family", ["low_rank_slow_decay", "equal_keys"])
@pytest.mark.parametrize("op", ["kda_step", "kda_sequence"])
def test_dropping_the_delta_term_is_gross_on_repeated_keys_and_small_on_random_ones(
    op: str, family: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(3):
        repeated = without_delta_term(op, family, seed, monkeypatch)
        plain = without_delta_term(op, "iid", seed, monkeypatch)
        record_property(f"{op}/{family}/{seed}", f"{repeated:.3f} against {plain:.3f} on iid keys")
        assert repeated > 0.2, f"{family}: {repeated:.3f}"
        assert plain < 0.05, f"iid: {plain:.3f}"


@pytest.mark.parametrize(
    ("family", "low", "high"),
    [("decay_near_one", 0.999, 1.0), ("low_rank_slow_decay", 0.97, 1.0), ("decay_at_bound", 0.0067, 0.0069)],
)
def test_decay_lies_where_the_family_says(family: str, low: float, high: float) -> None:
    case = make_case("kda_step", MINI, family, 4, 0)
    g = torch.einsum("nd,cd->nc", case["proj"][:, -132:-4].double(), case["f_b"].double()) + case["dt_bias"]
    live = (case["slots"] > 0).nonzero().squeeze(-1)
    decay = torch.exp(-5 * torch.sigmoid(case["A_log"].exp().repeat_interleave(128) * g[live]))
    share = ((decay > low) & (decay <= high)).double().mean()
    assert float(share) > 0.99


def test_equal_keys_are_equal_for_the_whole_sequence_with_beta_near_one() -> None:
    case = make_case("kda_sequence", MINI, "equal_keys", 20, 0)
    D = MINI["kda_num_heads"] * MINI["kda_head_dim"]
    keys = case["proj"][:, D : 2 * D]
    assert torch.equal(keys, keys[:1].expand_as(keys))
    assert torch.equal(case["conv_state"][case["slot"]][D : 2 * D].T, keys[:3])
    assert bool((case["proj"][:, -4:].float().sigmoid() > 0.99).all())


@pytest.mark.parametrize("family", ["peaks_bf16", "peaks_fp8"])
def test_losing_the_last_or_a_page_boundary_key_is_gross_where_peaks_are_planted(family: str) -> None:
    case = make_case("mla_attend", MINI, family, 8, 0)
    right = ORACLES["mla_attend"](case)["latent"]
    short = {**case, "lengths": (case["lengths"] - 1).clamp(min=0)}
    plain = make_case("mla_attend", MINI, family.replace("peaks", "iid"), 8, 0)
    long = case["lengths"] > MINI["page_size"]
    assert rmse_ratio(ORACLES["mla_attend"](short)["latent"][long], right[long]) > 0.2
    plain_short = {**plain, "lengths": (plain["lengths"] - 1).clamp(min=0)}
    plain_right = ORACLES["mla_attend"](plain)["latent"]
    assert rmse_ratio(ORACLES["mla_attend"](plain_short)["latent"][0], plain_right[0]) < 0.2


@pytest.mark.parametrize(
    ("family", "scale"),
    # A planted peak takes the whole softmax whatever the scale of q, so q_scale is left to the random keys.
    [("iid_fp8", "q_scale"), ("iid_fp8", "k_scale"), ("peaks_fp8", "k_scale"), ("saturating_fp8", "k_scale")],
)
def test_scales_are_no_powers_of_two_and_forgetting_one_is_gross(family: str, scale: str) -> None:
    case = make_case("mla_attend", MINI, family, 6, 0)
    right, wrong = (ORACLES["mla_attend"](c)["latent"] for c in (case, {**case, scale: 1.0}))
    assert math.frexp(case[scale])[0] != 0.5
    assert rmse_ratio(wrong, right) > 0.1


def test_saturating_families_exceed_what_e4m3_holds_in_queries_and_cache() -> None:
    case = make_case("mla_query", MINI, "saturating_fp8", 6, 0)
    out, mask = ORACLES["mla_query"](case), written("mla_query", case)["cache"]
    assert bool((out["q"].abs() == 448 * case["q_scale"]).any())
    assert bool((out["cache"][mask].abs() == 448 * case["k_scale"]).any())
    attend = make_case("mla_attend", MINI, "saturating_fp8", 6, 0)
    own = attend["cache"][attend["block_table"][0, 0]]
    assert bool((e4m3_decode(own).abs() == 448).any())
    assert bool((e4m3_decode(attend["q"]).abs() == 448).any())


def test_bf16_logits_change_the_chosen_set_where_scores_are_close() -> None:
    case = make_case("route", {**MINI, "num_experts": 256, "num_experts_per_token": 8}, "close_scores", 50, 0)
    coarse = (bf16(case["logits"]).float().sigmoid() + case["bias"]).topk(8, -1).indices
    single = (case["logits"].sigmoid() + case["bias"]).topk(8, -1).indices
    assert route_disagreements(case["logits"], case["bias"], coarse, 8).disagreements_beyond(4) > 10
    assert route_disagreements(case["logits"], case["bias"], single, 8).disagreements_beyond(4) == 0


def test_recovering_tiny_scores_by_subtracting_the_bias_is_gross() -> None:
    case = make_case("route", MINI, "tiny_scores", 6, 0)
    out = ORACLES["route"](case)
    recovered = ((case["logits"].sigmoid() + case["bias"]) - case["bias"]).gather(-1, out["ids"])
    weights = recovered / (recovered.sum(-1, keepdim=True) + 1e-20)
    assert rmse_ratio(weights, out["weights"]) > 0.9


def test_exact_ties_lie_at_the_cut_and_saturated_scores_tie_only_in_fp32() -> None:
    ties = make_case("route", MINI, "exact_ties", 40, 0)
    ids = ORACLES["route"](ties)["ids"]
    judgement = route_disagreements(ties["logits"], ties["bias"], ids, MINI["num_experts_per_token"])
    assert int((judgement.margin_ulps == 0).sum()) > 10
    saturated = make_case("route", MINI, "saturated", 40, 0)["logits"]
    assert float((saturated.sigmoid() == 1).float().mean()) > 0.2


@pytest.mark.parametrize("op", ["experts", "shared_expert"])
def test_silu_instead_of_situ_is_gross_only_for_large_arguments(op: str) -> None:
    def silu_instead(case: dict[str, Any]) -> dict[str, Any]:
        return {**case, "beta": 1e9, "linear_beta": 1e9}

    name = {"experts": "latent", "shared_expert": "partial"}[op]
    for family, gross in (("large_situ", True), ("iid", False)):
        case = make_case(op, MINI, family, 6, 0)
        ratio = rmse_ratio(ORACLES[op](silu_instead(case))[name], ORACLES[op](case)[name])
        assert (ratio > 1.0) if gross else (ratio < 0.2)


def test_a_scale_out_of_place_is_gross_where_scales_are_scattered() -> None:
    case = make_case("experts", MINI, "scattered_scales", 6, 0)
    moved = {**case, "w13_scale": case["w13_scale"].roll(1, dims=-1)}
    assert rmse_ratio(ORACLES["experts"](moved)["latent"], ORACLES["experts"](case)["latent"]) > 0.5


def test_experts_that_nobody_chose_hold_gross_weights() -> None:
    case = make_case("experts", MINI, "one_set", 6, 0)
    assert case["ids"].sort(-1).values.unique(dim=0).shape[0] == 1
    assert case["ids"].unique(dim=0).shape[0] > 1
    size = mxfp4_dequantise(case["w13_packed"], case["w13_scale"]).abs().amax((1, 2))
    unused = torch.ones(MINI["experts_held"], dtype=torch.bool)
    unused[case["ids"].unique()] = False
    assert size[unused].min() > 1e15 * size[~unused].max()


@pytest.mark.parametrize("op", ["projection", "all_reduce", "moe_front"])
def test_rounding_partial_sums_to_bf16_is_gross_only_where_terms_cancel(op: str) -> None:
    errors = {}
    for family in ("iid", "cancelling"):
        case = make_case(op, MINI, family, 6, 0)
        if op == "all_reduce":
            total = bf16(bf16(case["y.0"].float() * (1 + 2**-8)).float() + case["y.1"].float())
        else:
            x, W = case["x"].float(), case["weight" if op == "projection" else "gate_weight"].float()
            half = x.shape[1] // 2
            total = bf16(bf16(x[:, :half] @ W[:, :half].T).float() + bf16(x[:, half:] @ W[:, half:].T).float())
        errors[family] = rmse_ratio(total, next(iter(ORACLES[op](case).values())))
    assert errors["cancelling"] > 0.05
    assert errors["iid"] < 0.01


def test_equal_sources_tie_exactly_and_peaked_ones_leave_one_source() -> None:
    equal = make_case("attn_res", MINI, "equal_sources", 3, 0)
    del equal["out_norm_weight"]
    assert torch.allclose(ORACLES["attn_res"](equal)["mixed"], equal["prefix"].double(), rtol=1e-12)
    peaked = make_case("attn_res", MINI, "peaked", 6, 0)
    del peaked["out_norm_weight"]
    out = ORACLES["attn_res"](peaked)
    sources = torch.cat([peaked["blocks"][:, :2].double(), out["prefix"][:, None]], 1)
    nearest = (sources - out["mixed"][:, None]).abs().amax(-1).amin(-1)
    assert float(nearest.median()) < 1e-3
