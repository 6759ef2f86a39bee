"""Where a step runs, why, and what the specialised path refuses to start with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_models import SMALL, HandDriven, prompt_of, runner_of, weights_of

from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment, DeploymentError
from decode_impl.parallel.errors import RankDisagreed
from decode_impl.runner import GENERIC, SPECIALIZED, ModelRunner
from decode_impl.specialized.contract import BATCH_BINS, batch_bin
from decode_impl.specialized.plan import Decision, Fallback, plan, require_agreement
from decode_impl.specialized.requirements import unsupported

DECODE = Chunk([5], 7, 1, (1,))
PREFILL = Chunk([5, 6], 0, 1, (1,))
LATER_CHUNK = Chunk([5, 6], 4, 1, (1,))
FIRST = Chunk([5], 0, 1, (1,))


def verify(drafts: int) -> Chunk:
    return Chunk([5] * (1 + drafts), 7, 1, (1,), targets=range(1, 2 + drafts))


STEPS = {
    Fallback.EMPTY: ([], False),
    Fallback.PREFILL: ([PREFILL], False),
    Fallback.MIXED: ([PREFILL, DECODE], False),
    Fallback.FIRST_TOKEN: ([FIRST], False),
    Fallback.TOO_MANY_ROWS: ([DECODE] * 65, False),
    Fallback.VERIFY_MIXED: ([verify(3), DECODE], False),
    Fallback.RAGGED_VERIFY: ([verify(3), verify(4)], False),
    Fallback.DRAFT_COUNT: ([verify(2), verify(2)], False),
    Fallback.ALL_LOGITS: ([DECODE], True),
}


def test_every_reason_of_the_planner_has_a_step_in_this_file() -> None:
    """The runner adds one of its own, tested with the graphs."""
    assert set(STEPS) == set(Fallback) - {Fallback.MISSING_GRAPH}


@pytest.mark.parametrize("reason", list(STEPS), ids=lambda reason: reason.name)
def test_a_step_that_falls_back_runs_generic_and_its_reason_is_counted(reason: Fallback) -> None:
    chunks, all_logits = STEPS[reason]
    assert plan(chunks, all_logits) == Decision(None, reason)
    runner = runner_of(decode_backend="latency_specialized", max_batch=64)
    result = runner.execute(chunks, all_logits)
    assert result.path == GENERIC
    rows = sum(len(chunk.tokens) if chunk.verifies else 1 for chunk in chunks)
    assert result.logits.shape == (rows, SMALL.vocab_size) or all_logits
    assert dict(runner.fallbacks) == {reason: 1}
    assert runner.steps[SPECIALIZED] == 0


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([PREFILL, LATER_CHUNK], Fallback.PREFILL),
        ([PREFILL, FIRST], Fallback.PREFILL),
        ([LATER_CHUNK, DECODE], Fallback.MIXED),
        ([FIRST, FIRST], Fallback.FIRST_TOKEN),
        ([FIRST, DECODE], Fallback.MIXED),
        ([verify(3), PREFILL], Fallback.VERIFY_MIXED),
        ([verify(1)], Fallback.DRAFT_COUNT),
        ([verify(8)], Fallback.DRAFT_COUNT),
        ([verify(7)] * 9, Fallback.TOO_MANY_ROWS),
    ],
)
def test_anything_but_pure_decode_is_generic(chunks: list[Chunk], reason: Fallback) -> None:
    assert plan(chunks) == Decision(None, reason)


def test_pure_decode_of_1_to_64_rows_is_specialised_in_the_smallest_bin_that_holds_it() -> None:
    for rows in range(1, 65):
        decision = plan([DECODE] * rows)
        assert decision.specialized
        assert decision.reason is None
        assert decision.bin == min(size for size in BATCH_BINS if size >= rows)
    assert not plan([DECODE] * 65).specialized


@pytest.mark.parametrize("drafts", range(3, 8))
def test_a_verify_step_of_one_width_is_specialised_up_to_64_rows(drafts: int) -> None:
    for requests in range(1, 64 // (1 + drafts) + 1):
        rows = requests * (1 + drafts)
        assert plan([verify(drafts)] * requests) == Decision(batch_bin(rows), None)


@pytest.mark.parametrize("rows", [0, -1, 65])
def test_a_row_count_without_a_bin_is_an_error(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows given, 1 to 64"):
        batch_bin(rows)


def test_ranks_that_disagree_stop_the_step_and_the_first_one_is_named() -> None:
    agreed, other = Decision(4, None), Decision(None, Fallback.MIXED)
    assert require_agreement([agreed] * 8) == agreed
    with pytest.raises(RankDisagreed, match=r"^rank 5, slot 1, epoch 9: decided .*MIXED.*rank 0 decided"):
        require_agreement([agreed] * 5 + [other] + [agreed, other], step=9)


def test_the_generic_backend_counts_no_fallbacks() -> None:
    runner = runner_of(decode_backend="auto")
    request = HandDriven(runner, prompt_of(6))
    request.run(4, 1, 1)
    assert runner.fallbacks == {}
    assert dict(runner.steps) == {GENERIC: 3}


def test_the_specialised_backend_decodes_on_the_specialised_path() -> None:
    runner = runner_of(decode_backend="latency_specialized")
    request = HandDriven(runner, prompt_of(6))
    request.run(4, 1, 1)
    assert dict(runner.steps) == {GENERIC: 1, SPECIALIZED: 2}
    assert dict(runner.fallbacks) == {Fallback.ALL_LOGITS: 1}


ONE_WRONG = {
    "KDA head size is 64": ({"kda_head_dim": 64}, {}),
    "conv kernel is 3": ({"conv_kernel": 3}, {}),
    "SiTU betas are 4.0 and 20.0": ({"situ_linear_beta": 20.0}, {}),
    "17 experts per token": ({"num_experts": 32, "experts_per_token": 17}, {}),
    "hidden size is 72": ({"hidden_size": 72}, {}),
    "2 dense layers": ({"first_dense_layers": 2}, {}),
    "recurrent state is bf16": ({}, {"state_dtype": "bf16"}),
    "tensor parallelism is 3": ({}, {"tensor_parallel": 3}),
    "max batch is 65": ({}, {"max_batch": 65}),
    "page size is 8": ({}, {"page_size": 8, "prefix_block": 64}),
}


def test_a_supported_model_has_no_reasons_against_it() -> None:
    assert unsupported(SMALL, Deployment()) == []


@pytest.mark.parametrize("reason", ONE_WRONG)
def test_each_unsupported_value_is_the_one_reason_given(reason: str) -> None:
    fields, options = ONE_WRONG[reason]
    (given,) = unsupported(replace(SMALL, **fields), Deployment(**options))
    assert given.startswith(reason)


def test_a_refusal_lists_every_reason_at_once() -> None:
    fields = {key: value for wrong, _ in ONE_WRONG.values() for key, value in wrong.items()}
    options = {key: value for _, wrong in ONE_WRONG.values() for key, value in wrong.items()}
    reasons = unsupported(replace(SMALL, **fields), Deployment(**options))
    assert len(reasons) == len(ONE_WRONG)
    assert all(any(given.startswith(reason) for given in reasons) for reason in ONE_WRONG)


def test_a_runner_refuses_to_start_specialised_with_every_reason_in_one_line() -> None:
    deployment = Deployment(decode_backend="latency_specialized", state_dtype="bf16", max_batch=65)
    with pytest.raises(DeploymentError) as refusal:
        ModelRunner(weights_of(), deployment)
    message = str(refusal.value)
    assert "recurrent state is bf16" in message
    assert "max batch is 65" in message
    assert "\n" not in message


def test_a_deployment_lists_every_wrong_option_at_once() -> None:
    wrong = {
        "decode_backend": "fast",
        "kv_cache_dtype": "int8",
        "state_dtype": "f16",
        "tensor_parallel": 0,
        "max_batch": 0,
        "max_context": 0,
        "pages": 0,
        "prefill_chunk": 0,
        "prefix_block": 24,
        "prefix_snapshots": -1,
    }
    with pytest.raises(DeploymentError) as refusal:
        Deployment(**wrong)
    problems = str(refusal.value).split("; ")
    assert sorted(problem.split(" is ")[0] for problem in problems) == sorted(wrong)
    with pytest.raises(DeploymentError, match="page_size is 0"):
        Deployment(page_size=0)


def test_a_pool_without_a_size_gives_every_request_its_full_context() -> None:
    deployment = Deployment(max_batch=3, max_context=33, page_size=16, prefix_block=16)
    assert deployment.pool_pages == 3 * 3
    assert ModelRunner(weights_of(), deployment).latents.free_pages == 9
