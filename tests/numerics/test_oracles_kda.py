"""Promises of the oracles of Kimi delta attention.

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

from numerics.oracles import ORACLES, written
from numerics.oracles.kda import Token, delta_rule

H, D = 2, 3
"""Heads and head size of the tiny cases."""


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_case(rows: int, slots: int = 6) -> dict[str, Any]:
    width = H * D
    return {
        "proj": normal(rows, 4 * width + D + H, seed=1).bfloat16(),
        "f_b": normal(width, D, seed=2).bfloat16(),
        "conv_weight": normal(3 * width, 4, seed=3),
        "A_log": normal(H, seed=4, std=0.3),
        "dt_bias": normal(width, seed=5),
        "lower_bound": -5.0,
        "norm_weight": normal(D, seed=6).bfloat16(),
        "conv_state": normal(slots, 3 * width, 3, seed=7).bfloat16(),
        "state": normal(slots, H, D, D, seed=8),
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def step_by_elements(case: dict[str, Any], row: int, slot: int) -> tuple[list[float], list[Any]]:
    """One row of one step in plain Python floats: y [D] and the new state [h][v][k]."""
    width = H * D
    x = case["proj"][row].tolist()
    window, taps = case["conv_state"][slot].tolist(), case["conv_weight"].tolist()
    conv = []
    for c in range(3 * width):
        total = sum(taps[c][j] * value for j, value in enumerate([*window[c], x[c]]))
        conv.append(total * sigmoid(total))
    gate, f_a, beta = x[3 * width : 4 * width], x[4 * width : 4 * width + D], x[4 * width + D :]
    f_b = case["f_b"].tolist()
    y, state = [], case["state"][slot].tolist()
    for h in range(H):
        q, k, v = (conv[part * width + h * D : part * width + (h + 1) * D] for part in range(3))
        q = [e / math.sqrt(sum(f * f for f in q) + 1e-6) / math.sqrt(D) for e in q]
        k = [e / math.sqrt(sum(f * f for f in k) + 1e-6) for e in k]
        S = state[h]
        for j in range(D):
            c = h * D + j
            g1 = sum(a * b for a, b in zip(f_a, f_b[c], strict=True)) + case["dt_bias"].tolist()[c]
            decay = math.exp(-5.0 * sigmoid(math.exp(case["A_log"].tolist()[h]) * g1))
            for i in range(D):
                S[i][j] *= decay
        o = []
        for i in range(D):
            u = (v[i] - sum(S[i][j] * k[j] for j in range(D))) * sigmoid(beta[h])
            S[i] = [S[i][j] + u * k[j] for j in range(D)]
            o.append(sum(S[i][j] * q[j] for j in range(D)))
        root = math.sqrt(sum(e * e for e in o) / D + 1e-5)
        weight = case["norm_weight"].tolist()
        y += [o[i] / root * weight[i] * sigmoid(gate[h * D + i]) for i in range(D)]
    return y, state


def token(k: Tensor, v: Tensor, q: Tensor, beta: float = 1.0, l: float = 0.0) -> Token:
    """A token of one head with the same decay in every channel."""
    d = k.shape[-1]
    return Token(q[None], k[None], v[None], torch.full((1, d), l).double(), torch.tensor([beta]).double(), q[None])


def random_tokens(n: int, d: int, seed: int) -> list[Token]:
    q, v = normal(n, d, seed=seed).double(), normal(n, d, seed=seed + 1).double()
    k = torch.nn.functional.normalize(normal(n, d, seed=seed + 2).double(), dim=-1)
    l, beta = -normal(n, d, seed=seed + 3).double().abs(), normal(n, seed=seed + 4).double().sigmoid()
    return [Token(q[t, None], k[t, None], v[t, None], l[t, None], beta[t, None], q[t, None]) for t in range(n)]


class TestRecurrence:
    def test_with_beta_one_the_state_recalls_a_unit_key_exactly(self) -> None:
        S, k, v = normal(1, 8, 8).double(), torch.nn.functional.normalize(normal(8, seed=1).double(), dim=0), normal(8)
        S, o = delta_rule(S, token(k, v.double(), k, beta=1.0, l=-0.7))
        assert torch.allclose(o[0], v.double(), rtol=1e-12)
        S, o = delta_rule(S, token(k, 2 * v.double(), k))
        assert torch.allclose(o[0], 2 * v.double(), rtol=1e-12)

    def test_orthonormal_keys_without_decay_store_every_value(self) -> None:
        keys = torch.linalg.qr(normal(8, 8).double())[0]
        values = normal(8, 8, seed=1).double()
        S = torch.zeros(1, 8, 8, dtype=torch.float64)
        for k, v in zip(keys, values, strict=True):
            S, _ = delta_rule(S, token(k, v, k))
        assert torch.allclose(S[0] @ keys.T, values.T, atol=1e-12)

    def test_with_beta_zero_the_state_only_decays_per_key_channel(self) -> None:
        S = normal(1, 4, 4).double()
        l = torch.tensor([[0.0, -0.5, -1.0, -5.0]]).double()
        t = Token(torch.ones(1, 4).double(), torch.ones(1, 4).double(), torch.ones(1, 4).double(), l, torch.zeros(1), l)
        after, o = delta_rule(S, t)
        assert torch.allclose(after, S * l.exp()[:, None, :], rtol=1e-14)
        assert torch.allclose(o, after.sum(-1), rtol=1e-14)

    def test_a_chunk_equals_one_affine_map_of_the_state_whichever_way_it_is_composed(self) -> None:
        """S_t = S_{t-1} M_t + N_t with M = Diag(a)(I - beta k k^T), N = beta v k^T; maps compose associatively."""
        tokens, d = random_tokens(12, 6, seed=20), 6
        maps = []
        for t in tokens:
            k, v, beta = t.k[0], t.v[0], float(t.beta)
            M = t.l[0].exp().diag() @ (torch.eye(d).double() - beta * torch.outer(k, k))
            maps.append((M, beta * torch.outer(v, k)))

        def compose(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            if len(items) == 1:
                return items[0]
            (M1, N1), (M2, N2) = compose(items[: len(items) // 2]), compose(items[len(items) // 2 :])
            return M1 @ M2, N1 @ M2 + N2

        S = start = normal(1, d, d, seed=30).double()
        for t in tokens:
            S, o = delta_rule(S, t)
        M, N = compose(maps)
        assert torch.allclose(S[0], start[0] @ M + N, atol=1e-13)
        assert torch.allclose(o[0], (start[0] @ M + N) @ tokens[-1].q[0], atol=1e-13)


class TestStep:
    def test_it_equals_an_elementwise_loop(self) -> None:
        case = {**tiny_case(3), "slots": torch.tensor([5, 2, 3])}
        out = ORACLES["kda_step"](case)
        for row, slot in enumerate([5, 2, 3]):
            y, S = step_by_elements(case, row, slot)
            assert out["y"][row].tolist() == pytest.approx(y, rel=1e-10)
            assert torch.allclose(out["state"][slot], torch.tensor(S, dtype=torch.float64), rtol=1e-10)

    def test_the_conv_window_moves_by_one_and_holds_raw_projections(self) -> None:
        case = {**tiny_case(2), "slots": torch.tensor([4, 1])}
        out = ORACLES["kda_step"](case)["conv_state"]
        for row, slot in enumerate([4, 1]):
            assert torch.equal(out[slot, :, :2], case["conv_state"][slot, :, 1:].double())
            assert torch.equal(out[slot, :, 2], case["proj"][row, : 3 * H * D].double())

    def test_a_null_row_gives_zero_and_only_owned_slots_change(self) -> None:
        case = {**tiny_case(3), "slots": torch.tensor([4, 0, 2])}
        case["proj"][1] = math.nan
        out, mask = ORACLES["kda_step"](case), written("kda_step", case)
        assert bool((out["y"][1] == 0).all())
        assert mask["state"].tolist() == [False, False, True, False, True, False]
        for name in ("conv_state", "state"):
            assert torch.equal(out[name][~mask[name]], case[name][~mask[name]].double())
            assert not torch.equal(out[name][mask[name]], case[name][mask[name]].double())

    def test_pools_that_are_fp64_already_are_copied_and_not_written(self) -> None:
        case = {**tiny_case(2), "slots": torch.tensor([4, 1])}
        case |= {name: case[name].double() for name in ("conv_state", "state")}
        before = {name: case[name].clone() for name in ("conv_state", "state")}
        out = ORACLES["kda_step"](case)
        for name, pool in before.items():
            assert torch.equal(case[name], pool)
            assert not torch.equal(out[name], pool)

    def test_a_batch_of_null_rows_gives_zeros(self) -> None:
        out = ORACLES["kda_step"]({**tiny_case(2), "slots": torch.tensor([0, 0])})
        assert out["y"].shape == (2, H * D)
        assert bool((out["y"] == 0).all())


class TestSequence:
    def test_it_equals_one_step_per_token(self) -> None:
        case = tiny_case(7)
        out = ORACLES["kda_sequence"]({**case, "slot": 2})
        pools = {name: case[name].double() for name in ("conv_state", "state")}
        for t in range(7):
            step = ORACLES["kda_step"]({**case, **pools, "proj": case["proj"][t : t + 1], "slots": torch.tensor([2])})
            pools = {name: step[name] for name in pools}
            assert torch.allclose(out["y"][t], step["y"][0], rtol=1e-12)
        for name, pool in pools.items():
            assert torch.allclose(out[name], pool, rtol=1e-12)

    @pytest.mark.parametrize("tokens", [1, 2, 3, 4])
    def test_a_short_sequence_keeps_the_older_part_of_the_window(self, tokens: int) -> None:
        case = {**tiny_case(tokens), "slot": 3}
        history = torch.cat([case["conv_state"][3].T, case["proj"][:, : 3 * H * D]]).double()
        assert torch.equal(ORACLES["kda_sequence"](case)["conv_state"][3], history[-3:].T)

    def test_the_null_slot_gives_zero_and_changes_nothing(self) -> None:
        case = {**tiny_case(3), "slot": 0}
        out = ORACLES["kda_sequence"](case)
        assert bool((out["y"] == 0).all())
        assert torch.equal(out["state"], case["state"].double())
        assert not bool(written("kda_sequence", case)["state"].any())
