"""Promises of the oracles of multi-head latent attention.

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

from numerics.formats import e4m3_decode, e4m3_encode
from numerics.oracles import ORACLES, comparable, written

h, NOPE, R, C, V, RANK, PAGE = 2, 4, 2, 6, 5, 8, 4


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def query_case(rows: int, fp8: bool = False) -> dict[str, Any]:
    cache = normal(5, PAGE, C + R, seed=1)
    return {
        "a": normal(rows, RANK + C + R, seed=2).bfloat16(),
        "q_norm_weight": normal(RANK, seed=3).bfloat16(),
        "kv_norm_weight": normal(C, seed=4).bfloat16(),
        "eps": 1e-5,
        "q_b": normal(h * (NOPE + R), RANK, seed=5).bfloat16(),
        "w_uk": normal(h, NOPE, C, seed=6).bfloat16(),
        "q_scale": 0.83 if fp8 else 1.0,
        "k_scale": 0.7 if fp8 else 1.0,
        "cache": e4m3_encode(cache) if fp8 else cache.bfloat16(),
        "positions": torch.tensor([9, 17, 4, 13])[:rows],
    }


def attend_case(lengths: list[int], fp8: bool = False) -> dict[str, Any]:
    rows, pages = len(lengths), 12
    q, cache = normal(rows, h, C + R, seed=7), normal(pages, PAGE, C + R, seed=8)
    table = torch.stack(
        [1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(r)) for r in range(rows)]
    )
    return {
        "q": e4m3_encode(q) if fp8 else q.bfloat16(),
        "cache": e4m3_encode(cache) if fp8 else cache.bfloat16(),
        "block_table": table[:, :4],
        "lengths": torch.tensor(lengths),
        "softmax_scale": 0.4,
        "q_scale": 0.83 if fp8 else 1.0,
        "k_scale": 0.7 if fp8 else 1.0,
        "kv_rank": C,
    }


def attend_by_elements(case: dict[str, Any], row: int, head: int) -> list[float]:
    """Latent of one row and head in plain Python floats, token by token through the block table."""
    q, cache, q_scale, k_scale = case["q"], case["cache"], 1.0, 1.0
    if cache.dtype is torch.uint8:
        q, cache, q_scale, k_scale = e4m3_decode(q), e4m3_decode(cache), case["q_scale"], case["k_scale"]
    query = q[row, head].tolist()
    scores, values = [], []
    for j in range(int(case["lengths"][row])):
        key = cache[int(case["block_table"][row, j // PAGE]), j % PAGE].tolist()
        dot = sum(a * b for a, b in zip(query, key, strict=True))
        scores.append(case["softmax_scale"] * q_scale * k_scale * dot)
        values.append(key[:C])
    weights = [math.exp(s - max(scores)) for s in scores]
    return [k_scale * sum(w * v[c] for w, v in zip(weights, values, strict=True)) / sum(weights) for c in range(C)]


class TestQuery:
    def test_it_equals_an_elementwise_loop(self) -> None:
        case = query_case(3)
        out = ORACLES["mla_query"](case)
        for row in range(3):
            a = case["a"][row].tolist()
            q_c, kv_c, k_pe = a[:RANK], a[RANK : RANK + C], a[RANK + C :]
            q_n, kv_n = (
                [x / math.sqrt(sum(e * e for e in part) / len(part) + 1e-5) * w for x, w in zip(part, ws, strict=True)]
                for part, ws in ((q_c, case["q_norm_weight"].tolist()), (kv_c, case["kv_norm_weight"].tolist()))
            )
            page, offset = divmod(int(case["positions"][row]), PAGE)
            assert out["cache"][page, offset].tolist() == pytest.approx([*kv_n, *k_pe], rel=1e-12)
            q = [sum(w * x for w, x in zip(ws, q_n, strict=True)) for ws in case["q_b"].tolist()]
            for head in range(h):
                nope = q[head * (NOPE + R) : head * (NOPE + R) + NOPE]
                rope = q[head * (NOPE + R) + NOPE : (head + 1) * (NOPE + R)]
                w_uk = case["w_uk"][head].tolist()
                absorbed = [sum(nope[p] * w_uk[p][c] for p in range(NOPE)) for c in range(C)]
                assert out["q"][row, head].tolist() == pytest.approx([*absorbed, *rope], rel=1e-10, abs=1e-12)

    @pytest.mark.parametrize("fp8", [False, True])
    def test_only_the_rows_own_positions_change_and_null_positions_write_nothing(self, fp8: bool) -> None:
        case = query_case(4, fp8)
        case["positions"][2] = 3
        out, mask = ORACLES["mla_query"](case), written("mla_query", case)["cache"]
        before = e4m3_decode(case["cache"], torch.float64) * 0.7 if fp8 else case["cache"].double()
        assert int(mask.sum()) == 3
        assert not bool(mask[0].any())
        assert torch.equal(out["cache"][~mask], before[~mask])
        assert bool((out["cache"][mask] != before[mask]).any(-1).all())
        assert bool((out["q"][2] != 0).all())

    def test_an_fp8_output_saturates_at_448_times_its_scale_and_is_otherwise_unrounded(self) -> None:
        case = query_case(2, fp8=True)
        plain = ORACLES["mla_query"]({**case, "cache": normal(5, PAGE, C + R).bfloat16()})
        assert torch.equal(ORACLES["mla_query"](case)["q"], plain["q"])
        case["a"][:, -R:] = 1000.0
        case["q_b"] = case["q_b"] * 1000
        out = ORACLES["mla_query"](case)
        assert out["q"].abs().max().item() == pytest.approx(448 * 0.83)
        assert out["cache"][2, 1, -R:].tolist() == pytest.approx([448 * 0.7] * R)

    def test_bytes_of_an_implementation_become_comparable_with_the_oracle(self) -> None:
        case = query_case(2, fp8=True)
        expected = ORACLES["mla_query"](case)
        bytes_out = {"q": e4m3_encode(expected["q"] / 0.83), "cache": e4m3_encode(expected["cache"] / 0.7)}
        values = comparable("mla_query", case, bytes_out)
        for name in ("q", "cache"):
            close = (values[name] - expected[name]).abs() <= 0.0626 * expected[name].abs() + 1e-3
            assert bool(close.all())


class TestAttend:
    @pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
    def test_it_equals_an_elementwise_loop_through_the_block_table(self, fp8: bool) -> None:
        case = attend_case([1, 3, 4, 5, 16, 7], fp8)
        latent = ORACLES["mla_attend"](case)["latent"]
        for row in range(6):
            for head in range(h):
                assert latent[row, head].tolist() == pytest.approx(attend_by_elements(case, row, head), rel=1e-11)

    @pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
    def test_nothing_beyond_a_rows_length_is_read_and_length_zero_gives_zero(self, fp8: bool) -> None:
        case = attend_case([5, 0, 1, 8], fp8)
        expected = ORACLES["mla_attend"](case)["latent"]
        owned = torch.zeros(12, PAGE, dtype=torch.bool)
        for row, length in enumerate([5, 0, 1, 8]):
            for j in range(length):
                owned[case["block_table"][row, j // PAGE], j % PAGE] = True
        case["cache"][~owned] = 0x7F if fp8 else math.nan
        assert torch.equal(ORACLES["mla_attend"](case)["latent"], expected)
        assert bool((expected[1] == 0).all())

    def test_a_single_key_returns_its_value_and_equal_keys_their_mean(self) -> None:
        case = attend_case([1, 6])
        case["q"][1] = 0
        latent = ORACLES["mla_attend"](case)["latent"]
        first = case["cache"][case["block_table"][0, 0], 0, :C].double()
        assert torch.allclose(latent[0], first.expand(h, C))
        rows = case["cache"][case["block_table"][1, :2]].flatten(0, 1)[:6, :C].double()
        assert torch.allclose(latent[1], rows.mean(0).expand(h, C))

    def test_scales_belong_to_stored_fp8_and_leave_a_bf16_cache_alone(self) -> None:
        case = attend_case([5, 8])
        latent = ORACLES["mla_attend"](case)["latent"]
        assert torch.equal(ORACLES["mla_attend"]({**case, "q_scale": 0.83, "k_scale": 0.7})["latent"], latent)

    def test_a_sequence_is_one_row_per_token_each_seeing_one_key_more(self) -> None:
        case = attend_case([1] * 5, fp8=True)
        table, start = case["block_table"][0], 6
        sequence = ORACLES["mla_attend_sequence"]({**case, "block_table": table, "start": start})["latent"]
        rows = {**case, "block_table": table.expand(5, -1), "lengths": torch.arange(start + 1, start + 6)}
        assert torch.equal(sequence, ORACLES["mla_attend"](rows)["latent"])

    def test_absorbed_attention_equals_the_expanded_form_with_per_head_keys_and_values(self) -> None:
        """The latent is decompressed by kv_b = [W_UK; W_UV] and attended to by torch's attention in FP64."""
        q_nope, q_rope = normal(1, h, NOPE, seed=11).double(), normal(1, h, R, seed=12).double()
        w_uk, w_uv = normal(h, NOPE, C, seed=13).double(), normal(h, C, V, seed=14).double()
        gate = normal(1, h * V, seed=15).double()
        case = attend_case([11])
        keys = case["cache"][case["block_table"][0]].flatten(0, 1)[:11].double()
        case["q"] = torch.cat([torch.einsum("nhp,hpc->nhc", q_nope, w_uk), q_rope], -1)
        latent = ORACLES["mla_attend"](case)["latent"]
        y = ORACLES["mla_value"]({"latent": latent, "w_uv": w_uv, "gate": gate})["y"]
        k_nope = torch.einsum("lc,hpc->hlp", keys[:, :C], w_uk)
        k = torch.cat([k_nope, keys[:, C:].expand(h, -1, -1)], -1)[None]
        v = torch.einsum("lc,hcv->hlv", keys[:, :C], w_uv)[None]
        q = torch.cat([q_nope, q_rope], -1)[:, :, None]
        expanded = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.4).flatten(1)
        assert torch.allclose(y, expanded / (1 + torch.exp(-gate)), rtol=1e-10)
