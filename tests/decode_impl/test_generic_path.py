"""The generic path answers the same question however its tokens are cut into steps."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from small_models import E4M3_NOISE, SMALL, HandDriven, prompt_of, relative_rms, rounding_noise, runner_of, weights_of
from torch import Tensor

from decode_impl.generic import OPS
from decode_impl.generic.kda import CHUNK, Gates, chunked_delta_rule, delta_rule
from decode_impl.runner import GENERIC
from numerics.bounds import F32, gamma, judge, output_floor
from numerics.metrics import error_stats

TOKENS = 40
"""More than two pages and two chunks of the delta rule, with a rest of 8."""

Run = tuple[Tensor, dict[str, Tensor]]


def run(kv_cache_dtype: str, *lengths: int) -> Run:
    request = HandDriven(runner_of(kv_cache_dtype=kv_cache_dtype), prompt_of(TOKENS))
    return request.run(*lengths), request.caches()


@cache
def one_shot(kv_cache_dtype: str) -> Run:
    return run(kv_cache_dtype, TOKENS)


def assert_same_answer(got: Run, wanted: Run, first_row: int = 0) -> None:
    bound = rounding_noise(SMALL)
    assert relative_rms(got[0], wanted[0][first_row:]) <= bound
    # The first layer sees the same input bits: its window is exact, its state differs by FP32 roundings only.
    assert torch.equal(got[1]["conv(0, 0)"], wanted[1]["conv(0, 0)"])
    assert relative_rms(got[1]["state(0, 0)"], wanted[1]["state(0, 0)"]) <= gamma(8 * TOKENS, F32.unit_roundoff)
    for name, tensor in wanted[1].items():
        assert relative_rms(values(got[1][name]), values(tensor)) <= bound, name


def values(stored: Tensor) -> Tensor:
    return stored.view(torch.float8_e4m3fn).float() if stored.dtype == torch.uint8 else stored


def test_prefill_equals_token_by_token_decode() -> None:
    assert_same_answer(run("bf16", *[1] * TOKENS), one_shot("bf16"))


def test_prefill_equals_token_by_token_decode_on_an_fp8_cache_up_to_one_e4m3_rounding() -> None:
    # A latent that differs by one BF16 rounding may be stored as the neighbouring E4M3 value in either run. The softmax
    # averages over rows, so logits keep the BF16 bound.
    got, wanted = run("fp8", *[1] * TOKENS), one_shot("fp8")
    assert relative_rms(got[0], wanted[0]) <= rounding_noise(SMALL)
    latents = [values(result[1]["latent3"]) for result in (got, wanted)]
    assert relative_rms(*latents) <= math.hypot(rounding_noise(SMALL), math.sqrt(2) * E4M3_NOISE)


@pytest.mark.parametrize("split", range(1, TOKENS))
def test_a_prompt_prefilled_in_two_chunks_equals_one_shot_prefill(split: int) -> None:
    request = HandDriven(runner_of(), prompt_of(TOKENS))
    logits = request.runner.execute([request.chunk(split)]).logits
    rest = request.runner.execute([request.chunk(TOKENS - split)], all_logits=True).logits
    wanted = one_shot("bf16")
    assert relative_rms(logits, wanted[0][split - 1 : split]) <= rounding_noise(SMALL)
    assert_same_answer((rest, request.caches()), wanted, first_row=split)


@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 33])
def test_prefill_in_many_equal_chunks_equals_one_shot_prefill(length: int) -> None:
    lengths = [length] * (TOKENS // length) + [TOKENS % length] * (TOKENS % length > 0)
    assert_same_answer(run("bf16", *lengths), one_shot("bf16"))


def test_a_one_token_prompt_is_the_first_row_of_a_longer_one() -> None:
    request = HandDriven(runner_of(), prompt_of(TOKENS)[:1])
    logits = request.run(1)
    assert relative_rms(logits, one_shot("bf16")[0][:1]) <= rounding_noise(SMALL)


def test_the_whole_history_matters() -> None:
    """The bound of this file is one that a lost state, window or page would break."""
    tokens = prompt_of(TOKENS)
    whole = one_shot("bf16")[0][-1:]
    for lost in ("state", "conv", "latent"):
        request = HandDriven(runner_of(), tokens)
        request.runner.execute([request.chunk(TOKENS - 1)])
        states, latents = request.runner.states, request.runner.latents
        if lost == "latent":
            latents.layers[3][request.pages[:2]] = 0
        else:
            for pool in (states.state if lost == "state" else states.conv).values():
                pool[request.slot] = 0
        assert relative_rms(request.run(1), whole) > rounding_noise(SMALL), lost


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_a_rerun_gives_the_same_bits(backend: str, kv_cache_dtype: str) -> None:
    first, second = (
        (request.run(20, *[1] * 8), request.caches())
        for request in (
            HandDriven(runner_of(decode_backend=backend, kv_cache_dtype=kv_cache_dtype), prompt_of(28))
            for _ in range(2)
        )
    )
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_a_step_of_prefill_and_decode_keeps_requests_apart() -> None:
    runner = runner_of()
    decoding, prefilling = HandDriven(runner, prompt_of(20, 1)), HandDriven(runner, prompt_of(18, 2))
    decoding.run(19)
    mixed = runner.execute([prefilling.chunk(18), decoding.chunk(1)])
    assert mixed.path == GENERIC
    for request, logits in ((prefilling, mixed.logits[:1]), (decoding, mixed.logits[1:])):
        alone = HandDriven(runner_of(), request.tokens)
        wanted = alone.run(len(request.tokens))
        assert relative_rms(logits, wanted[-1:]) <= rounding_noise(SMALL)
        for name, tensor in alone.caches().items():
            assert relative_rms(request.caches()[name], tensor) <= rounding_noise(SMALL), name


# The delta rule: many tokens at once against one at a time.


def delta_case(decay: str, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Gates]:
    generator = torch.Generator().manual_seed(tokens)
    heads, d = 2, 32
    S = torch.randn(heads, d, d, generator=generator) / d**0.5
    q, k, v = (torch.randn(tokens, heads, d, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    noise = torch.randn(tokens, heads, d, generator=generator)
    log_decay = {
        "at the bound": torch.full_like(noise, -5.0),
        "near one": -1e-4 * noise.abs(),
        "mixed": -5.0 * torch.sigmoid(4 * noise),
        "bound then one": torch.where(torch.arange(tokens)[:, None, None] % 16 < 8, -5.0, -1e-4 * noise.abs()),
    }[decay]
    return S, q, k, v, Gates(log_decay, torch.sigmoid(torch.randn(tokens, heads, generator=generator)))


def token_loop(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    S, rows = S.clone()[None], []
    for t in range(q.shape[0]):
        step = Gates(gates.log_decay[t : t + 1], gates.beta[t : t + 1])
        rows.append(delta_rule(S, q[t : t + 1], k[t : t + 1], v[t : t + 1], step))
    return torch.cat(rows), S[0]


def recurrence_fp64(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} Diag(exp l_t) (I - beta k k^T) + beta v k^T, o_t = S_t q_t, as explicit matrices."""
    S, q, k, v, l, beta = (x.double() for x in (S, q, k, v, *gates))
    identity, rows = torch.eye(k.shape[-1], dtype=torch.float64), []
    for t in range(q.shape[0]):
        kk, vk = (torch.einsum("hi,hj->hij", x[t], k[t]) for x in (k, v))
        b = beta[t][:, None, None]
        S = S @ torch.diag_embed(l[t].exp()) @ (identity - b * kk) + b * vk
        rows.append(torch.einsum("hvk,hk->hv", S, q[t]))
    return torch.stack(rows), S


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("decay", ["at the bound", "near one", "mixed", "bound then one"])
def test_the_chunked_delta_rule_is_as_exact_as_the_token_loop(decay: str, tokens: int) -> None:
    case = delta_case(decay, tokens)
    reference = recurrence_fp64(*case)
    # A chunk exponentiates differences of running sums, which reach 5 * CHUNK: rounding such a sum costs up to half
    # its ULP, an error that the token loop does not have.
    sum_error = float(F32.ulp(torch.tensor(5.0 * CHUNK))) / 2
    for chunked, looped, exact in zip(chunked_delta_rule(*case), token_loop(*case), reference, strict=True):
        floor = output_floor(exact, F32)
        allowance = sum_error * float(exact.abs().max())
        floor = type(floor)(floor.rms + allowance, floor.max + allowance)
        verdict = judge(error_stats(chunked, exact), error_stats(looped, exact), floor)
        assert verdict, str(verdict)


def test_a_chunk_of_any_length_gives_the_same_recurrence() -> None:
    case = delta_case("mixed", 48)
    exact = recurrence_fp64(*case)[0]
    for chunk in (1, 3, 16):
        # Longest running sum of log-decays, rounded, then exponentiated; plus the roundings of a token's products.
        bound = float(F32.ulp(torch.tensor(5.0 * chunk))) + gamma(2 * 32, F32.unit_roundoff)
        assert relative_rms(chunked_delta_rule(*case, chunk=chunk)[0], exact) <= bound


def test_the_sequence_op_leaves_the_window_and_state_of_the_step_op() -> None:
    part = weights_of().layers[0].attention[0]
    heads, d = part.heads, SMALL.kda_head_dim
    proj = torch.randn(21, part.in_proj.shape[0], generator=torch.Generator().manual_seed(3)).bfloat16()
    pools = []
    for form in ("kda_step", "kda_sequence"):
        conv, state = torch.zeros(2, 3 * heads * d, 3).bfloat16(), torch.zeros(2, heads, d, d)
        arguments = {
            "f_b": part.f_b,
            "conv_weight": part.conv,
            "A_log": part.A_log,
            "dt_bias": part.dt_bias,
            "lower_bound": -5.0,
            "norm_weight": part.norm,
            "conv_state": conv,
            "state": state,
        }
        if form == "kda_sequence":
            y = OPS[form](proj=proj, slot=1, **arguments)
        else:
            y = torch.cat([OPS[form](proj=row[None], slots=torch.tensor([1]), **arguments) for row in proj])
        pools.append((y, conv, state))
    (y_step, conv_step, state_step), (y_seq, conv_seq, state_seq) = pools
    assert torch.equal(conv_step, conv_seq)
    assert torch.equal(conv_seq[1], proj[-3:, : 3 * heads * d].T)
    assert relative_rms(state_seq[1], state_step[1]) <= gamma(21 * 8, F32.unit_roundoff)
    # Outputs are BF16: o may round the other way once before the norm and once after it.
    assert relative_rms(y_seq, y_step) <= 2 * 2.0**-8
