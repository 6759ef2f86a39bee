"""Promises of `numerics.contracts`: both paths do what their contracts allow; a rounding more or less does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_impl import generic
from decode_impl.ops import call_on_case
from decode_impl.specialized import contract as fused
from decode_impl.specialized import emulation
from numerics.contracts import (
    CONTRACTS,
    GENERIC,
    SPECIALIZED,
    Contract,
    Expected,
    compliance,
    contract_table,
    expected,
    roundings,
)
from numerics.contracts import bounded as fp
from numerics.contracts.bounded import Bounded, exact
from numerics.families import FAMILIES, MINI, make_case
from numerics.formats import bf16, e4m3_encode
from numerics.metrics import error_stats
from numerics.oracles import ORACLES, comparable, written

ROOT = Path(__file__).parents[2]
TABLES = {GENERIC: generic.OPS, SPECIALIZED: emulation.OPS}
TINY = {**MINI, "kda_num_heads": 2, "kda_head_dim": 32, "verify_width": 3}
PLAIN = {op: families[0] for op, families in FAMILIES.items()}
JUDGED = sorted(op for op in FAMILIES if op != "route")


def stored(outputs: dict[str, Expected]) -> dict[str, Tensor]:
    """What an implementation stores that computes the expected values without any FP32 error."""
    formats = {"bf16": bf16, "f32": lambda x: x.float(), "e4m3": e4m3_encode}
    return {name: formats[x.fmt](x.before.value) for name, x in outputs.items()}


def outside(op: str, case: dict[str, Any], outputs: dict[str, Tensor], path: str) -> int:
    """Elements that lie outside the contract, over all outputs, where the op may write."""
    masks, total = written(op, case), 0
    for name, wanted in expected(op, path, case, outputs).items():
        owned: Any = masks.get(name, slice(None))
        total += compliance(outputs[name][owned], wanted[owned]).outside
    return total


class TestBothPathsComply:
    @settings(max_examples=60, deadline=None)
    @given(
        op=st.sampled_from(JUDGED),
        pick=st.integers(0, 99),
        rows=st.integers(1, 9),
        width=st.integers(2, 8),
        seed=st.integers(0, 2**31),
    )
    def test_on_every_family_rows_and_seed(self, op: str, pick: int, rows: int, width: int, seed: int) -> None:
        family = FAMILIES[op][pick % len(FAMILIES[op])]
        # A specialised step holds 64 rows.
        case = make_case(op, {**TINY, "verify_width": min(width, 64 // rows)}, family, rows, seed)
        for path, ops in TABLES.items():
            if op in ops:
                assert outside(op, case, call_on_case(ops, op, case), path) == 0, (op, family, path)

    @pytest.mark.parametrize("op", JUDGED)
    def test_and_most_outputs_are_pinned_to_one_value(self, op: str) -> None:
        case = make_case(op, TINY, PLAIN[op], 5, 0)
        for path in TABLES:
            wanted = expected(op, path, case)
            if op in ("attn_res", "output_mix"):
                wanted = expected(op, path, case, stored(wanted))
            shares = [compliance(stored(wanted)[n], x).pinned for n, x in wanted.items() if x.fmt != "f32"]
            assert min(shares) > 0.6, (op, path, shares)


class TestARoundingMoreOrLess:
    @pytest.mark.parametrize("path", [GENERIC, SPECIALIZED])
    @pytest.mark.parametrize("op", JUDGED)
    def test_is_seen_at_every_site(self, op: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        every = {site for table in CONTRACTS.values() for site in table[op].sites}
        own = CONTRACTS[path][op]
        last = {"y", "mixed", "z", "partial", "delta", "latent"}
        # A BF16 cache rounds what it stores anyway; E4M3 shows whether a BF16 rounding came before.
        case = make_case(op, TINY, "iid_fp8" if op == "mla_query" else PLAIN[op], 16, 0)
        for site in sorted(every):
            changed = tuple(s for s in own.sites if s != site) if site in own.sites else (*own.sites, site)
            variant = Contract(changed, own.split_keys, own.quadratic_norm)
            with monkeypatch.context() as patch:
                patch.setitem(roundings.CONTRACTS[path], op, variant)  # type: ignore[index]
                outputs = stored(expected(op, path, case))
            # The last rounding is made by the format that the output is stored in, whatever the contract says.
            final = site in last and (op, site) not in {("output_mix", "partial"), ("moe_tail", "latent")}
            if final or (op in ("attn_res", "output_mix") and site == "prefix"):
                continue
            assert outside(op, case, outputs, path) > 0, (op, path, site)


class TestOracle:
    @pytest.mark.parametrize("op", JUDGED)
    def test_without_roundings_it_is_the_plain_oracle(self, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(roundings.CONTRACTS[GENERIC], op, Contract())  # type: ignore[index]
        for family in FAMILIES[op]:
            case = make_case(op, TINY, family, 4, 1)
            reference = ORACLES[op](case)
            for name, wanted in expected(op, GENERIC, case).items():
                value = wanted.before.value
                if wanted.fmt == "e4m3":
                    value = (value * case["q_scale" if name == "q" else "k_scale"]).clamp(
                        -448 * case["q_scale" if name == "q" else "k_scale"],
                        448 * case["q_scale" if name == "q" else "k_scale"],
                    )
                # Another order of FP64 sums, through cancellation: far below what FP32 could explain.
                assert error_stats(value, reference[name]).rmse_ratio < 2.0**-32, (family, name)

    @pytest.mark.parametrize("op", JUDGED)
    def test_what_the_bound_allows_is_small_against_the_relative_rule(self, op: str) -> None:
        case = make_case(op, TINY, PLAIN[op], 4, 2)
        reference, masks = ORACLES[op](case), written(op, case)
        own = comparable(op, case, call_on_case(generic.OPS, op, case))
        for name, wanted in expected(op, GENERIC, case).items():
            owned: Any = masks.get(name, slice(None))
            if wanted.fmt == "f32" and op.startswith("kda"):
                generic_error = error_stats(own[name][owned], reference[name][owned]).rmse
                typical = float(wanted.before.radius[owned].median())
                assert typical < generic_error / 4

    def test_the_splits_are_those_of_the_fused_attention(self) -> None:
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64):
            for pages in (1, 2, 7, 16, 17, 64, 200):
                assert roundings.split_length(rows, pages, 16) == fused.split_pages(pages, rows) * 16
        with pytest.raises(ValueError, match="65 rows"):
            roundings.split_length(65, 4, 16)

    def test_the_documented_table_is_the_one_in_use(self) -> None:
        command = [sys.executable, "-m", "numerics.contracts"]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert contract_table() in printed
        assert printed in (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
        used = {site for table in CONTRACTS.values() for c in table.values() for site in c.sites}
        assert used == set(roundings.SITES)


def f32_in_order(terms: Tensor) -> Tensor:
    """Sum along the last axis, one FP32 addition after the other."""
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    return total


class TestBounds:
    @settings(max_examples=40, deadline=None)
    @given(n=st.integers(1, 700), seed=st.integers(0, 10**6), spread=st.floats(0, 12), shift=st.floats(0, 3))
    def test_a_sum_in_any_order_lies_within_its_bound(self, n: int, seed: int, spread: float, shift: float) -> None:
        g = torch.Generator().manual_seed(seed)
        terms = (torch.randn(8, n, generator=g) + shift) * torch.exp2(torch.rand(8, n, generator=g) * spread)
        bound = fp.total(exact(terms))
        for order in (torch.arange(n), torch.randperm(n, generator=g), terms[0].argsort()):
            error = (f32_in_order(terms[:, order]).double() - bound.value).abs()
            assert bool((error <= bound.radius).all())

    @settings(max_examples=40, deadline=None)
    @given(k=st.integers(1, 500), seed=st.integers(0, 10**6))
    def test_a_product_lies_within_its_bound(self, k: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        a, b = torch.randn(5, k, generator=g).bfloat16(), torch.randn(k, 7, generator=g).bfloat16()
        bound = fp.matmul(exact(a), exact(b))
        for got in (a.float() @ b.float(), f32_in_order(a.float()[:, None] * b.float().T)):
            assert bool(((got.double() - bound.value).abs() <= bound.radius).all())

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 10**6), size=st.floats(-80, 80))
    def test_an_elementary_function_lies_within_its_bound(self, seed: int, size: float) -> None:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(64, generator=g) * abs(size) + size / 2
        pairs = [(torch.sigmoid, fp.sigmoid), (torch.tanh, fp.tanh), (torch.rsqrt, fp.rsqrt)]
        pairs += [(torch.exp, fp.exp)] if float(x.max()) < 88 else []
        for f32, bounded in pairs:
            y = x.abs() + 2.0**-20 if f32 is torch.rsqrt else x
            bound = bounded(exact(y))
            assert bool(((f32(y).double() - bound.value).abs() <= bound.radius).all()), f32.__name__

    @given(seed=st.integers(0, 10**6))
    def test_a_doubtful_value_stays_inside_through_every_operation(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        a = Bounded(torch.randn(3, 80, generator=g).double(), torch.rand(3, 80, generator=g).double() * 1e-3)
        b = Bounded(torch.randn(3, 80, generator=g).double(), torch.rand(3, 80, generator=g).double() * 1e-3)
        x, y = (v.value + v.radius * (torch.rand(v.value.shape, generator=g).double() * 2 - 1) for v in (a, b))
        cases = [
            (fp.add(a, b), x + y),
            (fp.mul(a, b), x * y),
            (fp.dot(a, b), (x * y).sum(-1)),
            (fp.matmul(a, b.map(lambda v: v.T)), x @ y.T),
            (fp.normalised(a, 1e-5), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
            (fp.sigmoid(a), x.sigmoid()),
            (fp.round_bf16(a), bf16(x).double()),
            (fp.total_of_parts([a, b]), x + y),
        ]
        for bound, value in cases:
            assert bool(((value - bound.value).abs() <= bound.radius).all())

    def test_sums_that_fp32_holds_are_exact_so_that_ties_round_one_way(self) -> None:
        g = torch.Generator().manual_seed(0)
        a, b = (torch.randn(4000, generator=g).bfloat16() for _ in range(2))
        assert float(fp.add(exact(a), exact(b)).radius.max()) == 0.0
        tie = fp.round_bf16(fp.add(exact(torch.tensor([1.0])), exact(torch.tensor([2.0**-8]))))
        assert (float(tie.value), float(tie.radius)) == (1.0, 0.0)
        far = fp.add(exact(torch.tensor([1.0])), exact(torch.tensor([2.0**-30])))
        assert float(far.radius) > 0

    def test_a_nan_and_a_wrong_shape_never_comply(self) -> None:
        wanted = Expected(exact(torch.ones(3)), "bf16")
        result = compliance(torch.tensor([1.0, float("nan"), 1.0]).bfloat16(), wanted)
        assert (result.outside, result.used) == (1, float("inf"))
        with pytest.raises(ValueError, match="the contract expects"):
            compliance(torch.ones(2), wanted)

    def test_the_factor_that_would_pass_is_reported(self) -> None:
        wanted = Expected(Bounded(torch.tensor([1.0]).double(), torch.tensor([1e-6]).double()), "f32")
        assert compliance(torch.tensor([1.0 + 2e-6]), wanted).used == pytest.approx(2.0, rel=0.1)
        assert compliance(torch.tensor([1.0 + 0.5e-6]), wanted).used < 1
