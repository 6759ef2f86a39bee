"""Promises of the oracles of the mixture of experts, and of the judgement of expert sets.

Two FP64 computations of one value, in another order, differ by at most about (operations) x 2^-53 of the largest term:
from 1e-14 for a handful of operations to 1e-10 through thousands with cancellation. A wrong
formula is off by 1e-3 and more.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics.oracles import ORACLES, RouteJudgement, route_disagreements

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def situ(g: float, u: float) -> float:
    return 4.0 * math.tanh(g / 4.0) * sigmoid(g) * 25.0 * math.tanh(u / 25.0)


def unpack(packed: Tensor, scale: Tensor) -> list[list[float]]:
    """A packed weight [N, K/2] as rows of Python floats."""
    rows = []
    for bytes_, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for byte in bytes_ for code in (byte % 16, byte // 16)]
        values = [(-1 if code >= 8 else 1) * E2M1[code % 8] for code in codes]
        rows.append([value * 2.0 ** (scales[i // 32] - 127) for i, value in enumerate(values)])
    return rows


def expert_case() -> dict[str, Any]:
    E, L, I, n = 3, 64, 32, 4
    gen = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=gen, dtype=torch.uint8)
        scale = torch.randint(122, 126, (*shape[:-1], shape[-1] // 32), generator=gen, dtype=torch.uint8)
        return packed, scale

    w13, w2 = weight(E, 2 * I, L), weight(E, L, I)
    return {
        "z": normal(n, L).bfloat16(),
        "ids": torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]]),
        "weights": normal(n, 2, seed=1).abs(),
        "w13_packed": w13[0],
        "w13_scale": w13[1],
        "w2_packed": w2[0],
        "w2_scale": w2[1],
        "beta": 4.0,
        "linear_beta": 25.0,
    }


class TestExperts:
    def test_they_equal_an_elementwise_loop_over_rows_and_slots(self) -> None:
        case = expert_case()
        latent = ORACLES["experts"](case)["latent"]
        for row, z in enumerate(case["z"].tolist()):
            total = [0.0] * 64
            for e, w in zip(case["ids"][row].tolist(), case["weights"][row].tolist(), strict=True):
                w13 = unpack(case["w13_packed"][e], case["w13_scale"][e])
                gate_up = [sum(a * b for a, b in zip(line, z, strict=True)) for line in w13]
                hidden = [situ(gate_up[i], gate_up[32 + i]) for i in range(32)]
                for j, line in enumerate(unpack(case["w2_packed"][e], case["w2_scale"][e])):
                    total[j] += w * sum(a * b for a, b in zip(line, hidden, strict=True))
            assert latent[row].tolist() == pytest.approx(total, rel=1e-10, abs=1e-11)

    def test_an_id_outside_the_weights_is_refused(self) -> None:
        for bad in (-1, 3):
            case = expert_case()
            case["ids"][0, 0] = bad
            with pytest.raises(IndexError):
                ORACLES["experts"](case)

    def test_the_activation_saturates_at_its_two_bounds_and_is_silu_times_linear_near_zero(self) -> None:
        def one(g: float, u: float) -> float:
            x, weights = torch.ones(1, 1), torch.tensor([[g], [u]])
            case = {"x": x, "gate_up": weights, "down": torch.ones(1, 1), "beta": 4.0, "linear_beta": 25.0}
            return ORACLES["shared_expert"](case)["partial"].item()

        assert one(1000.0, 1000.0) == pytest.approx(4.0 * 25.0)
        assert one(1000.0, -1000.0) == pytest.approx(-4.0 * 25.0)
        assert abs(one(-1000.0, 1000.0)) < 1e-300
        assert one(0.01, 0.02) == pytest.approx(0.01 * sigmoid(0.01) * 0.02, rel=1e-5)


class TestFrontSharedTail:
    def test_front_is_two_products_of_the_same_row(self) -> None:
        x, gate, down = normal(3, 20), normal(5, 20, seed=1), normal(4, 20, seed=2)
        out = ORACLES["moe_front"]({"x": x, "gate_weight": gate, "down_weight": down})
        both = torch.einsum("nk,ek->ne", x.double(), torch.cat([gate, down]).double())
        assert torch.allclose(torch.cat([out["logits"], out["z"]], 1), both, rtol=1e-12)

    def test_shared_expert_takes_the_gate_from_the_first_half(self) -> None:
        x, gate_up, down = normal(2, 6).bfloat16(), normal(8, 6, seed=1).bfloat16(), normal(6, 4, seed=2).bfloat16()
        case = {"x": x, "gate_up": gate_up, "down": down, "beta": 4.0, "linear_beta": 25.0}
        partial = ORACLES["shared_expert"](case)["partial"]
        for row in range(2):
            lines = [sum(a * b for a, b in zip(w, x[row].tolist(), strict=True)) for w in gate_up.tolist()]
            hidden = [situ(lines[i], lines[4 + i]) for i in range(4)]
            expected = [sum(a * b for a, b in zip(w, hidden, strict=True)) for w in down.tolist()]
            assert partial[row].tolist() == pytest.approx(expected, rel=1e-12)

    def test_tail_norms_the_summed_latent_and_adds_the_summed_shared(self) -> None:
        latent, shared = [normal(3, 8, seed=s) for s in (1, 2)], [normal(3, 5, seed=s) for s in (3, 4)]
        weight, up = normal(8, seed=5), normal(5, 8, seed=6)
        case = {"norm_weight": weight, "up_weight": up, "eps": 1e-5}
        case |= {f"latent.{r}": x for r, x in enumerate(latent)} | {f"shared.{r}": x for r, x in enumerate(shared)}
        summed = latent[0].double() + latent[1].double()
        normed = torch.nn.functional.rms_norm(summed, (8,), weight.double(), 1e-5)
        expected = torch.nn.functional.linear(normed, up.double()) + shared[0].double() + shared[1].double()
        assert torch.allclose(ORACLES["moe_tail"](case)["delta"], expected, rtol=1e-12)


class TestRoute:
    def test_ids_fall_by_biased_score_with_ties_to_the_lower_id(self) -> None:
        logits, bias = torch.tensor([[0.0, 1.0, 0.0, -1.0, 1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0])
        out = ORACLES["route"]({"logits": logits, "bias": bias, "top_k": 4, "scaling": 1.0})
        assert out["ids"].tolist() == [[3, 1, 4, 0]]
        assert out["ids"].dtype is torch.int64

    def test_an_all_zero_row_takes_the_first_experts_in_order(self) -> None:
        case = {"logits": torch.zeros(3, 896), "bias": torch.zeros(896), "top_k": 16, "scaling": 1.0}
        assert ORACLES["route"](case)["ids"].tolist() == [list(range(16))] * 3

    def test_it_equals_a_sort_in_plain_python(self) -> None:
        logits, bias = normal(20, 30, std=2.0), normal(30, seed=1, std=0.2)
        out = ORACLES["route"]({"logits": logits, "bias": bias, "top_k": 6, "scaling": 2.5})
        for row in range(20):
            s = [sigmoid(x) for x in logits[row].tolist()]
            biased = [a + b for a, b in zip(s, bias.tolist(), strict=True)]
            order = [e for _, e in sorted((-score, e) for e, score in enumerate(biased))][:6]
            assert out["ids"][row].tolist() == order
            expected = [2.5 * s[e] / sum(s[e] for e in order) for e in order]
            assert out["weights"][row].tolist() == pytest.approx(expected, rel=1e-12)

    def test_weights_of_tiny_scores_survive_a_large_bias(self) -> None:
        logits = torch.tensor([[-18.0, -19.0, -40.0]])
        out = ORACLES["route"]({"logits": logits, "bias": torch.full((3,), 12.0), "top_k": 2, "scaling": 1.0})
        assert out["weights"][0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rel=1e-6)


class TestRouteJudgement:
    @staticmethod
    def judge(ids: list[list[int]], weights: Tensor | None = None) -> RouteJudgement:
        logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, -2.0]]).expand(len(ids), -1)
        return route_disagreements(logits, torch.zeros(5), torch.tensor(ids), 3, weights)

    def test_either_of_two_tied_experts_is_right(self) -> None:
        verdict = self.judge([[3, 1, 0], [3, 1, 2], [2, 3, 1]])
        assert verdict.disagreements == 0
        assert verdict.margin_ulps.tolist() == [0.0, 0.0, 0.0]
        assert verdict.order_ulps.tolist()[:2] == [0.0, 0.0]
        assert verdict.order_ulps[2].item() > 1e6

    def test_a_set_that_leaves_a_better_expert_out_is_wrong_by_the_gap_in_fp32_ulps(self) -> None:
        verdict = self.judge([[3, 1, 4], [3, 0, 2]])
        assert verdict.disagreements == 2
        # The cut is at a score of 1/2, where an FP32 ULP is 2^-24.
        expected = [(0.5 - sigmoid(-2.0)) * 2**24, (sigmoid(1.0) - 0.5) * 2**24]
        assert verdict.violation_ulps.tolist() == pytest.approx(expected)
        assert verdict.disagreements_beyond(max(expected) + 1) == 0
        assert verdict.disagreements_beyond(min(expected) + 1) == 1

    def test_a_repeated_or_impossible_id_is_malformed_and_infinitely_wrong(self) -> None:
        verdict = self.judge([[3, 3, 1], [3, 1, 5], [3, 1, -1], [3, 1, 0]])
        assert verdict.malformed == verdict.disagreements == 3
        assert verdict.violation_ulps.tolist() == [math.inf, math.inf, math.inf, 0.0]

    def test_nan_rows_are_counted_and_not_judged(self) -> None:
        logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 2.0, 1.0]])
        verdict = route_disagreements(logits, torch.zeros(3), torch.tensor([[0, 1], [1, 2]]), 2)
        assert (verdict.nan_rows, verdict.disagreements) == (1, 0)
        assert verdict.margin_ulps[0].isnan()

    def test_the_oracle_is_right_and_an_fp32_router_within_a_few_ulps(self) -> None:
        logits, bias = 1 + normal(300, 200, std=0.01), normal(200, seed=1, std=0.001)
        out = ORACLES["route"]({"logits": logits, "bias": bias, "top_k": 8, "scaling": 1.0})
        verdict = route_disagreements(logits, bias, out["ids"], 8, out["weights"])
        assert verdict.disagreements == 0
        assert verdict.weight_error == 0.0
        single = (logits.sigmoid() + bias).topk(8, -1).indices
        coarse = (logits.bfloat16().float().sigmoid() + bias).topk(8, -1).indices
        assert route_disagreements(logits, bias, single, 8).disagreements_beyond(4) == 0
        assert route_disagreements(logits, bias, coarse, 8).disagreements_beyond(4) > 100

    def test_weights_taken_from_biased_scores_are_wrong(self) -> None:
        logits, bias = normal(10, 20), torch.full((20,), 0.5)
        ids = ORACLES["route"]({"logits": logits, "bias": bias, "top_k": 4, "scaling": 2.0})["ids"]
        for offset, right in ((0.0, True), (0.5, False)):
            s = logits.sigmoid().gather(-1, ids) + offset
            error = route_disagreements(logits, bias, ids, 4, 2.0 * s / s.sum(-1, keepdim=True), 2.0).weight_error
            assert error is not None
            assert (error < 1e-6) == right

    def test_shapes_that_do_not_belong_together_are_refused(self) -> None:
        with pytest.raises(ValueError, match="routing 2 rows to 3 of 5"):
            route_disagreements(torch.zeros(2, 5), torch.zeros(5), torch.zeros(2, 2, dtype=torch.int64), 3)
