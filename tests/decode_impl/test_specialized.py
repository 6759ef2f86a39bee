"""The specialised path: a row's bits depend on its bin alone, and fused forms are exact where they say so."""

from __future__ import annotations

import random

import pytest
import torch
from small_models import SMALL, SPARSE, HandDriven, prompt_of, runner_of, weights_of
from torch import Tensor

from decode_impl.config import ModelConfig
from decode_impl.generic import OPS as GENERIC_OPS
from decode_impl.runner import SPECIALIZED, Paths
from decode_impl.specialized.contract import BATCH_BINS, batch_bin, split_k, split_pages
from decode_impl.specialized.emulation import OPS
from decode_impl.specialized.emulation.attn_res import _joined_parts
from decode_impl.specialized.emulation.mla import EMPTY, merge
from numerics.bounds import F32, gamma
from numerics.metrics import error_stats

Bits = dict[int, tuple[Tensor, dict[str, Tensor]]]


class Decoding:
    """Requests of different lengths in one runner, all about to decode; every step starts from the same caches."""

    def __init__(self, config: ModelConfig, count: int, longest: int = 60, **options: object) -> None:
        options = {"decode_backend": "latency_specialized", "max_batch": 64} | options
        self.runner = runner_of(config, **options)
        draw = random.Random(count)
        self.requests = [HandDriven(self.runner, prompt_of(draw.randint(2, longest), seed)) for seed in range(count)]
        for request in self.requests:
            self.runner.execute([request.chunk(len(request.tokens) - 1)])
        self.states = [self.runner.states.snapshot(request.slot) for request in self.requests]
        self.latents = {layer: pool.clone() for layer, pool in self.runner.latents.layers.items()}

    def step(self, order: list[int]) -> Bits:
        """Decode the requests `order`, in that order; logits and caches after it, by request."""
        for request, state in zip(self.requests, self.states, strict=True):
            self.runner.states.restore(request.slot, state)
            request.computed = len(request.tokens) - 1
        for layer, pool in self.latents.items():
            self.runner.latents.layers[layer].copy_(pool)
        result = self.runner.execute([self.requests[i].chunk(1) for i in order])
        assert result.path == SPECIALIZED
        return {i: (row, self.requests[i].caches()) for i, row in zip(order, result.logits, strict=True)}


def assert_same_bits(got: Bits, wanted: Bits) -> None:
    for i, (logits, caches) in got.items():
        assert torch.equal(logits, wanted[i][0]), f"logits of request {i}"
        for name, tensor in caches.items():
            assert torch.equal(tensor, wanted[i][1][name]), f"{name} of request {i}"


@pytest.mark.parametrize("bin_rows", BATCH_BINS)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SMALL, {}),
        (SPARSE, {}),
        (SPARSE, {"kv_cache_dtype": "fp8"}),
        (SPARSE, {"tensor_parallel": 8}),
    ],
    ids=["all experts", "routed", "fp8", "tp8"],
)
def test_a_requests_bits_depend_on_its_bin_and_not_on_order_mates_or_padding(
    config: ModelConfig, options: dict[str, object], bin_rows: int
) -> None:
    decoding, draw = Decoding(config, bin_rows, **options), random.Random(bin_rows)
    wanted = decoding.step(list(range(bin_rows)))
    assert_same_bits(decoding.step(list(reversed(range(bin_rows)))), wanted)
    for _ in range(2):
        fewest = bin_rows // 2 + 1  # any fewer rows would be padded to a smaller bin
        order = draw.sample(range(bin_rows), draw.randint(fewest, bin_rows))
        assert_same_bits(decoding.step(order), wanted)


def test_every_matrix_product_of_a_padded_step_has_the_rows_of_its_bin() -> None:
    """The cause of the promise above, whatever this machine's library does with three rows instead of four."""
    rows = []

    def projection(*, x: Tensor, weight: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return OPS["projection"](x=x, weight=weight)

    decoding = Decoding(SPARSE, 3)
    decoding.runner.paths = Paths(decoding.runner.paths.generic, {**OPS, "projection": projection})
    decoding.step([2, 0, 1])
    assert set(rows) == {4}


def test_another_bin_may_give_other_bits() -> None:
    """Otherwise the promise above would be weaker than the truth, or its test blind."""
    # 32 pages are eight splits for one row, four for 64 rows: a context of 65 to 128 keys is cut by one of them only.
    decoding = Decoding(SPARSE, 64, longest=200, max_context=512)
    wanted = decoding.step(list(range(64)))
    assert any(not torch.equal(decoding.step([i])[i][0], wanted[i][0]) for i in range(8))


def test_poison_in_padded_rows_and_foreign_pages_reaches_no_request() -> None:
    decoding = Decoding(SPARSE, 5)
    wanted = decoding.step([0, 1, 2])
    null = decoding.runner.latents.layers[3][0]
    null.fill_(torch.nan)
    for pool in (*decoding.runner.states.conv.values(), *decoding.runner.states.state.values()):
        pool[0] = torch.nan
    decoding.latents[3][0] = torch.nan
    decoding.latents[3][decoding.requests[4].pages] = torch.nan
    last = decoding.requests[1]
    decoding.latents[3][last.pages[-1], len(last.tokens) % 16 or 16 :] = torch.nan
    got = decoding.step([0, 1, 2])
    assert all(logits.isfinite().all() for logits, _ in got.values())
    assert_same_bits(got, wanted)


# Splits.


@pytest.mark.parametrize("columns", [32, 64, 96, 192, 1536, 7168, 12288, 100, 0])
def test_k_slices_are_equal_whole_grains_and_a_function_of_bin_and_width(columns: int) -> None:
    for rows in range(1, 65):
        splits = split_k(columns, rows)
        assert splits == split_k(columns, batch_bin(rows))
        assert splits == 1 or columns % (splits * 32) == 0
    assert split_k(7168, 1) == 8
    assert split_k(7168, 64) == 2


def test_kv_splits_cover_the_context_and_are_a_function_of_bin_and_limit() -> None:
    most = {1: 64, 2: 64, 4: 64, 8: 32, 16: 16, 32: 8, 64: 4}
    for max_pages in (1, 2, 15, 16, 17, 1000):
        for rows in range(1, 65):
            pages = split_pages(max_pages, rows)
            assert pages == split_pages(max_pages, batch_bin(rows))
            assert max_pages <= pages * most[batch_bin(rows)]
            assert pages == 4 or (pages - 1) * most[batch_bin(rows)] < max_pages


def attention_case(rows: int, lengths: list[int], page: int = 16, max_pages: int = 40) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    return {
        "q": torch.randn(rows, 2, 48, generator=generator).bfloat16(),
        "cache": torch.randn(1 + rows * max_pages, page, 48, generator=generator).bfloat16(),
        "block_table": 1 + torch.arange(rows * max_pages).view(rows, max_pages),
        "lengths": torch.tensor(lengths),
        "softmax_scale": 0.2,
        "q_scale": 1.0,
        "k_scale": 1.0,
        "kv_rank": 32,
    }


def test_attention_of_a_row_does_not_depend_on_how_long_its_mates_are() -> None:
    # A split is 4 pages = 64 keys: the first row has three of them, with whatever mate.
    short = OPS["mla_attend"](**attention_case(4, [129, 1, 64, 16]))
    for mate in (0, 16, 65, 130, 640):
        assert torch.equal(OPS["mla_attend"](**attention_case(4, [129, 1, 64, mate]))[:3], short[:3])


def test_a_row_without_keys_is_zero_and_does_not_read_its_page() -> None:
    case = attention_case(2, [3, 0])
    case["cache"][case["block_table"][1]] = torch.nan
    assert not OPS["mla_attend"](**case)[1].any()


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_empty_split_contributes_exactly_nothing_to_the_merge(place: int) -> None:
    generator = torch.Generator().manual_seed(4)
    partials, lse = torch.randn(2, 3, 2, 8, generator=generator), 20 * torch.randn(2, 3, 2, generator=generator)
    wanted = merge(partials, lse)
    garbage, empty = torch.full((2, 1, 2, 8), 1e30), torch.full((2, 1, 2), EMPTY)
    widened = torch.cat([partials[:, :place], garbage, partials[:, place:]], dim=1)
    got = merge(widened, torch.cat([lse[:, :place], empty, lse[:, place:]], dim=1))
    assert torch.equal(got, wanted)


def test_a_single_split_passes_through_the_merge_unchanged() -> None:
    partial = torch.randn(1, 1, 2, 8)
    assert torch.equal(merge(partial, torch.full((1, 1, 2), -700.0)), partial[:, 0])


def test_the_merge_weighs_splits_by_their_base_2_log_sum_exp() -> None:
    partials = torch.tensor([1.0, 5.0]).view(1, 2, 1, 1)
    assert merge(partials, torch.tensor([1.0, 0.0]).view(1, 2, 1)).item() == pytest.approx((2 * 1 + 5) / 3, rel=2**-22)


# KDA: nothing is rounded between the projection and the gated norm.


def state_after_one_token(ops: object) -> tuple[Tensor, Tensor]:
    """The state that one token leaves in an empty slot, and beta v k^T computed in FP64 from the same inputs."""
    part = weights_of().layers[0].attention[0]
    heads, d = part.heads, SMALL.kda_head_dim
    generator = torch.Generator().manual_seed(6)
    proj = torch.randn(1, part.in_proj.shape[0], generator=generator).bfloat16()
    conv_state = torch.randn(2, 3 * heads * d, 3, generator=generator).bfloat16()
    window = torch.cat([conv_state[1], proj[0, : 3 * heads * d, None]], dim=-1).double()
    conv = torch.nn.functional.silu((window * part.conv.double()).sum(-1))
    _, k, v = conv.view(3, heads, d)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = torch.sigmoid(proj[0, -heads:].double())
    state = torch.zeros(2, heads, d, d)
    ops["kda_step"](
        proj=proj,
        f_b=part.f_b,
        conv_weight=part.conv,
        A_log=part.A_log,
        dt_bias=part.dt_bias,
        lower_bound=-5.0,
        norm_weight=part.norm,
        conv_state=conv_state,
        state=state,
        slots=torch.tensor([1]),
    )
    return state[1], torch.einsum("hv,hk,h->hvk", v, k, beta)


def test_the_specialised_convolution_keeps_fp32_and_the_generic_one_rounds_to_bf16() -> None:
    # Roundings on the way to the state: four taps, silu, the norm over d = 128, beta and two products.
    bound = gamma(128 + 16, F32.unit_roundoff)
    assert error_stats(*state_after_one_token(OPS)).rmse_ratio <= bound
    assert error_stats(*state_after_one_token(GENERIC_OPS)).rmse_ratio > 2.0**-10 > bound


# AttnRes: the norm of the mix by a quadratic form.


@pytest.mark.parametrize("alignment", ["independent", "parallel", "opposed"])
@pytest.mark.parametrize("num_blocks", [1, 8])
def test_the_quadratic_form_gives_the_norm_of_the_mix(alignment: str, num_blocks: int) -> None:
    generator, width = torch.Generator().manual_seed(num_blocks), 192
    p = torch.randn(3, width, generator=generator).bfloat16().float()
    sources = torch.randn(3, num_blocks, width, generator=generator).bfloat16().float()
    if alignment != "independent":
        sources = p[:, None] * (0.75 if alignment == "parallel" else -0.75) + sources * 2.0**-6
    query = torch.randn(width, generator=generator) / width**0.5
    _, square = _joined_parts(sources, p, query, 1e-5)

    wide = torch.cat([sources, p[:, None]], dim=1).double()
    logits = (wide.square().mean(-1) + 1e-5).rsqrt() * (wide * query.double()).sum(-1)
    weighted = logits.softmax(-1)[..., None] * wide
    direct = weighted.sum(1).square().sum(-1, keepdim=True)
    # Each of the form's three sums errs by gamma of its length times the sum of its magnitudes, which is at most
    # (sum of the weighted sources' norms)^2: where sources cancel, that is what is lost.
    magnitude = weighted.norm(dim=-1).sum(-1, keepdim=True).square()
    assert ((square - direct).abs() <= gamma(2 * width + 16, F32.unit_roundoff) * magnitude).all()


def test_without_blocks_the_mix_is_the_prefix_itself() -> None:
    prefix = torch.randn(2, 64).bfloat16()
    for ops in (OPS, GENERIC_OPS):
        new_prefix, mixed = ops["attn_res"](
            prefix=prefix,
            blocks=torch.full((2, 2, 64), torch.nan).bfloat16(),
            num_blocks=0,
            norm_weight=torch.ones(64),
            query_weight=torch.ones(64),
            eps=1e-5,
        )
        assert torch.equal(mixed, prefix)
        assert torch.equal(new_prefix, prefix)


def test_exact_router_ties_go_to_the_lower_expert_on_both_paths() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 2.0, -1.0]])
    for ops in (OPS, GENERIC_OPS):
        ids, weights = ops["route"](logits=logits, bias=torch.zeros(6), top_k=4, scaling=1.0)
        assert ids.tolist() == [[1, 2, 4, 0]]
        assert weights.sum().item() == pytest.approx(1.0, rel=gamma(8, F32.unit_roundoff))


def test_the_specialised_path_has_every_op_but_the_sequence_forms() -> None:
    assert GENERIC_OPS.keys() - OPS.keys() == {"kda_sequence", "mla_attend_sequence"}
    assert OPS.keys() <= GENERIC_OPS.keys()
