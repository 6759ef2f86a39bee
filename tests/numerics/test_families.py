"""Promises of `numerics.families`: cases are complete, seeded and poisoned, and each family shows what it is there
for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics.families import FAMILIES, GARBAGE, K3_SHARD_8, K3_SHARD_16, MINI, make_case
from numerics.formats import e4m3_decode
from numerics.metrics import tensor_hash
from numerics.oracles import ORACLES, written

OPS_MD = Path(__file__).parents[2] / "docs" / "ops.md"
ALL = [(op, family) for op, families in FAMILIES.items() for family in families]
IDS = [f"{op}-{family}" for op, family in ALL]

TINY = {**MINI, "kda_num_heads": 2, "kda_head_dim": 32}
"""KDA states of a sixteenth of the size, where only the make-up of a case is tested."""

DTYPES = {
    torch.float32: {"conv_weight", "A_log", "dt_bias", "state", "logits", "bias", "weights"},
    torch.int64: {"slots", "sources", "targets", "positions", "block_table", "lengths", "ids"},
    torch.uint8: {"w13_packed", "w13_scale", "w2_packed", "w2_scale"},
}
"""Inputs that are not BF16, after docs/ops.md; q and cache may be bytes."""


def documented_inputs(op: str) -> set[str]:
    """Names of an op's inputs in the table of docs/ops.md, optional ones with their question mark."""
    row = next(line for line in OPS_MD.read_text().splitlines() if line.startswith(f"| `{op}` |"))
    names = set()
    for segment in re.sub(r"\[[^]]*\]|\([^)]*\)", "", row.split("|")[2]).split(";"):
        # Explanations carry an equals sign: "proj ... = q,k,v", "slots ..., 0 = null".
        listed = re.sub(r",[^,]*=.*|=.*", "", segment)
        names |= {part.split()[0] for part in listed.split(",") if part.strip()}
    return names


def tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in case.items() if isinstance(value, Tensor)}


class TestCases:
    def test_every_op_of_the_contract_has_an_oracle_and_families(self) -> None:
        ops = set(re.findall(r"^\| `(\w+)` \|", OPS_MD.read_text(), re.MULTILINE))
        assert ops == set(ORACLES) == set(FAMILIES)

    @pytest.mark.parametrize("op", ["rms_norm", "attn_res", "kda_step", "mla_query", "route", "experts"])
    def test_a_case_holds_the_documented_inputs(self, op: str) -> None:
        names = documented_inputs(op)
        required = {name for name in names if not name.endswith("?")}
        case = set(make_case(op, TINY, FAMILIES[op][0], 3, 0))
        assert required <= case <= {name.removesuffix("?") for name in names}

    @pytest.mark.parametrize("rows", [1, 2, 9])
    @pytest.mark.parametrize(("op", "family"), ALL, ids=IDS)
    def test_the_oracle_takes_every_case_gives_finite_values_and_changes_no_input(
        self, op: str, family: str, rows: int
    ) -> None:
        case = make_case(op, TINY, family, rows, 3)
        before = {name: tensor_hash(x) for name, x in tensors(case).items()}
        outputs = ORACLES[op](case)
        assert {name: tensor_hash(x) for name, x in tensors(case).items()} == before
        for name, x in outputs.items():
            assert bool(x.isfinite().all()), name
            assert x.dtype is (torch.int64 if name == "ids" else torch.float64)

    @pytest.mark.parametrize(("op", "family"), ALL, ids=IDS)
    def test_the_seed_alone_decides_every_bit_and_dtypes_are_the_documented_ones(self, op: str, family: str) -> None:
        first, again, other = (make_case(op, TINY, family, 4, seed) for seed in (1, 1, 2))
        assert first.keys() == again.keys()
        changed = 0
        for name, x in tensors(first).items():
            assert tensor_hash(x) == tensor_hash(again[name])
            changed += tensor_hash(x) != tensor_hash(other[name])
            expected = next((dtype for dtype, names in DTYPES.items() if name in names), torch.bfloat16)
            bytes_ = name.split(".")[0] in ("q", "cache") and family.endswith("fp8")
            assert x.dtype is (torch.uint8 if bytes_ else expected), name
        assert changed > 0

    @pytest.mark.parametrize(("op", "family"), ALL, ids=IDS)
    def test_subnormal_families_hold_subnormals_and_both_zeros(self, op: str, family: str) -> None:
        if not family.startswith("subnormals"):
            assert not any(
                (x.float().abs() < 1e-30).all()
                for x in tensors(make_case(op, TINY, family, 4, 0)).values()
                if x.dtype is torch.bfloat16 and x.numel()
            )
            return
        case = make_case(op, TINY, family, 4, 0)
        values = torch.cat([x.float().flatten() for x in tensors(case).values() if x.dtype is torch.bfloat16])
        assert bool(((values != 0) & (values.abs() < 2.0**-126)).any())
        assert bool(((values == 0) & torch.signbit(values)).any())
        assert bool(((values == 0) & ~torch.signbit(values)).any())

    @pytest.mark.parametrize("dims", [K3_SHARD_8, K3_SHARD_16], ids=["tp8", "tp16"])
    @pytest.mark.parametrize("op", ["attn_res", "kda_step", "mla_attend", "mla_query", "route"])
    def test_a_rank_of_the_true_model_makes_cases_too(self, op: str, dims: dict[str, int]) -> None:
        outputs = ORACLES[op](make_case(op, dims, FAMILIES[op][0], 2, 0))
        assert all(bool(x.isfinite().all()) for x in outputs.values())

    def test_misuse_is_refused_with_what_is_allowed(self) -> None:
        with pytest.raises(ValueError, match="projection, rms_norm"):
            make_case("softmax", MINI, "iid", 1, 0)
        with pytest.raises(ValueError, match="equal_keys"):
            make_case("kda_step", MINI, "ties", 1, 0)
        with pytest.raises(ValueError, match="at least one row"):
            make_case("route", MINI, "iid", 0, 0)
        with pytest.raises(ValueError, match="lack 'num_experts'"):
            make_case("route", {"hidden_size": 8}, "iid", 1, 0)
        with pytest.raises(ValueError, match="too few"):
            make_case("experts", {**MINI, "experts_held": 3}, "iid", 1, 0)


class TestRanges:
    @pytest.mark.parametrize(
        ("op", "name"),
        [
            ("rms_norm", "weight"),
            ("attn_res", "out_norm_weight"),
            ("output_mix", "norm_weight"),
            ("kda_step", "norm_weight"),
            ("mla_query", "kv_norm_weight"),
            ("mla_query", "q_norm_weight"),
            ("moe_tail", "norm_weight"),
        ],
    )
    def test_weights_of_norms_have_both_signs(self, op: str, name: str) -> None:
        weight = make_case(op, TINY, FAMILIES[op][0], 1, 0)[name]
        assert bool((weight < 0).any())
        assert bool((weight > 0).any())

    @pytest.mark.parametrize(
        ("op", "family", "output"),
        [
            ("projection", "cancelling", "y"),
            ("all_reduce", "cancelling", "y"),
            ("mla_value", "saturated_gates", "y"),
        ],
    )
    def test_some_results_are_beyond_fp16(self, op: str, family: str, output: str) -> None:
        assert float(ORACLES[op](make_case(op, MINI, family, 2, 0))[output].abs().max()) > torch.finfo(torch.half).max

    @pytest.mark.parametrize("op", ["attn_res", "output_mix"])
    def test_fp32_holds_no_exponential_of_a_score_in_a_pit(self, op: str) -> None:
        case = make_case(op, MINI, "pits", 4, 0)
        sources = torch.cat([case["blocks"][:, : case["num_blocks"]], case["prefix"][:, None]], 1).double()
        normed = sources * (sources.square().mean(-1, keepdim=True) + case["eps"]).rsqrt()
        scores = normed @ (case["norm_weight"].double() * case["query_weight"].double())
        assert float(scores.max().float().exp()) == 0.0

    def test_a_head_of_two_is_so_loud_that_an_exponential_overflows(self) -> None:
        case = make_case("kda_step", TINY, "faint_keys", 4, 0)
        v = case["proj"][case["slots"] > 0, 2 * 64 : 3 * 64].float().view(-1, 2, 32)
        assert float(v[:, 1].abs().max()) > 88 > float(v[:, 0].abs().max())


class TestPools:
    @pytest.mark.parametrize("family", FAMILIES["kda_step"])
    def test_slots_are_scattered_beyond_the_batch_with_null_rows_the_last_among_them(self, family: str) -> None:
        for seed in range(5):
            slots = make_case("kda_step", TINY, family, 6, seed)["slots"]
            live = slots[slots > 0]
            assert live.unique().numel() == live.numel() == 4
            assert int(slots[-1]) == 0
            assert int(make_case("kda_step", TINY, family, 1, seed)["slots"][0]) > 1
        slots = torch.stack([make_case("kda_step", TINY, family, 6, seed)["slots"] for seed in range(5)])
        assert bool((slots >= 6).any())
        assert not bool((slots == torch.arange(6)).all(1).any())

    def test_every_slot_of_a_pool_is_different_and_unowned_ones_are_gross(self) -> None:
        case = make_case("kda_step", TINY, "low_rank_slow_decay", 8, 0)
        owned = written("kda_step", case)["state"]
        assert len({tensor_hash(x) for x in case["state"]}) == case["state"].shape[0]
        assert len({tensor_hash(x) for x in case["conv_state"]}) == case["conv_state"].shape[0]
        assert case["state"][~owned].abs().mean() > 1000 * case["state"][owned].abs().mean()

    @pytest.mark.parametrize("family", [f for f in FAMILIES["mla_attend"] if not f.startswith("verify")])
    def test_lengths_are_ragged_and_pages_are_scattered_and_owned_once(self, family: str) -> None:
        case = make_case("mla_attend", MINI, family, 9, 0)
        page, lengths, table = MINI["page_size"], case["lengths"].tolist(), case["block_table"]
        assert {0, 1, page - 1, page, page + 1} <= set(lengths)
        assert max(lengths) > (64 if family.startswith("long") else 10) * page
        counts = [-(-n // page) for n in lengths]
        used = torch.cat([table[row, :count] for row, count in enumerate(counts)])
        assert used.unique().numel() == used.numel()
        assert int(used.min()) >= 1
        assert used.tolist() != sorted(used.tolist())
        assert all(bool((table[row, count:] == 0).all()) for row, count in enumerate(counts))

    @pytest.mark.parametrize("family", FAMILIES["mla_attend"])
    def test_everything_outside_the_rows_lengths_is_large_garbage(self, family: str) -> None:
        case = make_case("mla_attend", MINI, family, 9, 0)
        page = MINI["page_size"]
        values = e4m3_decode(case["cache"]) if case["cache"].dtype is torch.uint8 else case["cache"].float()
        owned = torch.zeros(values.shape[:2], dtype=torch.bool)
        for row, length in enumerate(case["lengths"].tolist()):
            for j in range(length):
                owned[case["block_table"][row, j // page], j % page] = True
        least = 448 if case["cache"].dtype is torch.uint8 else GARBAGE / 2 * 0.99
        assert bool((values[~owned].abs() >= least).all())
        assert values[owned].abs().median() < 10

    @pytest.mark.parametrize("family", ["verify_bf16", "verify_fp8"])
    def test_verify_rows_share_their_request_s_pages_and_see_one_key_more_each(self, family: str) -> None:
        widths = set()
        for seed in range(16):
            case = make_case("mla_attend", MINI, family, 24, seed)
            lengths, table = case["lengths"], case["block_table"]
            same = (table[1:] == table[:-1]).all(1) & (lengths[1:] > 0)
            assert bool((lengths[1:][same] == lengths[:-1][same] + 1).all())
            widths.add(1 + int(same.int().cumprod(0).sum()))
        assert widths == set(range(2, 9))

    @pytest.mark.parametrize("width", [2, 4, 6, 8])
    def test_verify_requests_own_scattered_slots_beyond_the_batch_and_start_from_one_of_them_or_another(
        self, width: int
    ) -> None:
        inside, outside = set(), 0
        for seed in range(6):
            case = make_case("kda_verify", {**TINY, "verify_width": width}, "iid", 6, seed)
            sources, targets = case["sources"], case["targets"]
            live = sources > 0
            assert int((~live).sum()) == 2
            assert not bool(live[-1])
            assert bool((targets[~live] == 0).all())
            assert targets[live].unique().numel() == targets[live].numel() == 4 * width
            assert bool((targets[live] >= 6).any())
            for source, own in zip(sources[live].tolist(), targets[live].tolist(), strict=True):
                inside |= {own.index(source)} if source in own else set()
                outside += source not in own
        assert inside == set(range(width))
        assert outside

    @pytest.mark.parametrize("family", FAMILIES["mla_query"])
    def test_query_positions_are_distinct_with_null_rows_the_last_among_them_and_a_page_edge(self, family: str) -> None:
        positions = torch.stack([make_case("mla_query", MINI, family, 8, seed)["positions"] for seed in range(4)])
        page = MINI["page_size"]
        assert bool(((positions < page).sum(1) == 2).all())
        assert bool((positions[:, -1] < page).all())
        assert all(row[row >= page].unique().numel() == 6 for row in positions)
        assert {0, page - 1} <= set((positions[positions >= page] % page).tolist())
