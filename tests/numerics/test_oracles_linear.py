"""Promises of the oracles of projection, RMSNorm, all-reduce, attention residuals and the output mix.

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

from numerics.oracles import ORACLES


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def mix_case(n: int = 3, H: int = 16, NB: int = 4, num_blocks: int = 2) -> dict[str, Any]:
    return {
        "prefix": normal(n, H, seed=1),
        "delta": normal(n, H, seed=2),
        "blocks": normal(n, NB, H, seed=3),
        "num_blocks": num_blocks,
        "norm_weight": normal(H, seed=4),
        "query_weight": normal(H, seed=5),
        "eps": 1e-5,
        "out_norm_weight": normal(H, seed=6),
    }


def mix_by_elements(p: list[float], case: dict[str, Any], row: int) -> list[float]:
    """One row of attention residuals in plain Python floats."""
    sources = [case["blocks"][row, s].tolist() for s in range(case["num_blocks"])] + [p]
    H = len(p)
    logits = []
    for source in sources:
        power = sum(x * x for x in source) / H
        query = zip(source, case["norm_weight"].tolist(), case["query_weight"].tolist(), strict=True)
        logits.append(sum(x * a * b for x, a, b in query) / math.sqrt(power + case["eps"]))
    weights = [math.exp(l) for l in logits]
    mix = [sum(w * s[j] for w, s in zip(weights, sources, strict=True)) / sum(weights) for j in range(H)]
    root = math.sqrt(sum(x * x for x in mix) / H + case["eps"])
    return [x / root * w for x, w in zip(mix, case["out_norm_weight"].tolist(), strict=True)]


def test_projection_is_the_exact_sum_of_products() -> None:
    x, weight = normal(3, 33), normal(5, 33, seed=1)
    y = ORACLES["projection"]({"x": x, "weight": weight})["y"]
    for i in range(3):
        for j in range(5):
            exact = math.fsum(a * b for a, b in zip(x[i].tolist(), weight[j].tolist(), strict=True))
            assert y[i, j].item() == pytest.approx(exact, abs=1e-14)


def test_rms_norm_gives_unit_power_and_keeps_direction_and_weight() -> None:
    x, weight = normal(4, 64, std=100.0), normal(64, seed=1)
    y = ORACLES["rms_norm"]({"x": x, "weight": weight, "eps": 1e-5})["y"]
    unweighted = y / weight.double()
    # Power falls short of 1 by eps over the mean square of x: 1e-5 / 1e4.
    assert torch.allclose(unweighted.square().mean(-1), torch.ones(4, dtype=torch.float64), atol=1e-8)
    assert torch.allclose(unweighted / x.double(), (unweighted[:, :1] / x[:, :1].double()).expand(4, 64))


def test_rms_norm_of_a_vector_below_eps_is_divided_by_its_root() -> None:
    x = torch.full((1, 8), 2.0**-30, dtype=torch.bfloat16)
    y = ORACLES["rms_norm"]({"x": x, "weight": torch.ones(8).bfloat16(), "eps": 1e-5})["y"]
    assert y[0, 0].item() == pytest.approx(2.0**-30 / math.sqrt(1e-5))


def test_all_reduce_keeps_what_bf16_and_fp32_partial_sums_lose() -> None:
    parts = [2.0**40, 1.0, -(2.0**40), 2.0**-20]
    case = {f"y.{r}": torch.full((1, 1), v, dtype=torch.bfloat16) for r, v in enumerate(parts)}
    assert ORACLES["all_reduce"](case)["y"].item() == 1.0 + 2.0**-20


def test_all_reduce_takes_ranks_beyond_nine_and_needs_one() -> None:
    case = {f"y.{r}": torch.full((1, 1), 2.0**r, dtype=torch.bfloat16) for r in range(12)}
    assert ORACLES["all_reduce"](case)["y"].item() == 2**12 - 1
    with pytest.raises(KeyError, match=r"y\.0"):
        ORACLES["all_reduce"]({"x": torch.zeros(1)})


def test_attn_res_equals_an_elementwise_loop() -> None:
    case = mix_case()
    out = ORACLES["attn_res"](case)
    for row in range(3):
        p = [a + b for a, b in zip(case["prefix"][row].tolist(), case["delta"][row].tolist(), strict=True)]
        assert out["prefix"][row].tolist() == p
        assert out["mixed"][row].tolist() == pytest.approx(mix_by_elements(p, case, row), rel=1e-12)


def test_attn_res_without_blocks_is_the_norm_of_the_prefix() -> None:
    case = mix_case(num_blocks=0)
    out = ORACLES["attn_res"](case)
    p = case["prefix"].double() + case["delta"].double()
    norm = torch.nn.functional.rms_norm(p, (16,), case["out_norm_weight"].double(), 1e-5)
    assert torch.allclose(out["mixed"], norm, rtol=1e-13)


def test_attn_res_without_an_output_norm_returns_the_mix_and_without_delta_the_prefix() -> None:
    case = mix_case(num_blocks=0)
    del case["out_norm_weight"], case["delta"]
    out = ORACLES["attn_res"](case)
    assert torch.equal(out["mixed"], case["prefix"].double())
    assert torch.equal(out["prefix"], case["prefix"].double())


def test_attn_res_averages_sources_of_equal_logits_and_picks_the_one_far_ahead() -> None:
    case = mix_case()
    del case["out_norm_weight"]
    case["query_weight"] = torch.zeros(16).bfloat16()
    sources = torch.cat(
        [case["blocks"][:, :2].double(), (case["prefix"].double() + case["delta"].double())[:, None]], 1
    )
    assert torch.allclose(ORACLES["attn_res"](case)["mixed"], sources.mean(1))
    case["norm_weight"] = torch.ones(16).bfloat16()
    case["query_weight"] = (1000 * case["blocks"][0, 1].float()).bfloat16()
    assert torch.allclose(ORACLES["attn_res"](case)["mixed"][0], sources[0, 1])


def test_attn_res_reads_no_block_beyond_num_blocks() -> None:
    case = mix_case()
    expected = ORACLES["attn_res"](case)["mixed"]
    case["blocks"][:, 2:] = math.nan
    assert torch.equal(ORACLES["attn_res"](case)["mixed"], expected)


@pytest.mark.parametrize("replace_prefix", [False, True])
def test_output_mix_is_one_product_over_all_ranks_followed_by_attn_res(replace_prefix: bool) -> None:
    case = mix_case()
    del case["delta"]
    ys, ws = [normal(3, k, seed=10 + k) for k in (4, 6)], [normal(16, k, seed=20 + k) for k in (4, 6)]
    whole = torch.cat(ys, 1).double() @ torch.cat(ws, 1).double().T
    ranks = {f"y.{r}": y for r, y in enumerate(ys)} | {f"weight.{r}": w for r, w in enumerate(ws)}
    out = ORACLES["output_mix"]({**case, **ranks, "replace_prefix": replace_prefix})
    p = whole if replace_prefix else case["prefix"].double() + whole
    expected = ORACLES["attn_res"]({**case, "prefix": p})
    assert torch.allclose(out["prefix"], p, rtol=1e-13)
    assert torch.allclose(out["mixed"], expected["mixed"], rtol=1e-12)
