"""The engine: however requests are scheduled, each gets the answer that it gets alone, and gives back what it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from small_models import SMALL, engine_of, prompt_of, rounding_noise, runner_of, weights_of
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.caches import CacheFull
from decode_impl.deployment import Deployment
from decode_impl.engine import Engine
from decode_impl.request import Finish, RequestError
from decode_impl.runner import ModelRunner, StepResult
from decode_impl.sampling import SamplingParams
from numerics.metrics import root_mean_square

NEW_TOKENS = 12


@dataclass(frozen=True)
class Solo:
    """What a request generates alone: its tokens and the logits they were chosen from."""

    tokens: list[int]
    logits: Tensor


@cache
def solo(prompt: tuple[int, ...], max_tokens: int = NEW_TOKENS) -> Solo:
    engine = engine_of(max_batch=1, prefix_snapshots=0)
    engine.add("solo", prompt, max_tokens)
    rows = []
    while (result := engine.step()) is not None:
        rows.append(result.logits[0])
    return Solo(engine.request("solo").output, torch.stack(rows))


def assert_solo_answer(engine: Engine, request_id: str) -> None:
    """The request's greedy output is its solo output; where they part, the solo run had a tie within the noise."""
    request = engine.request(request_id)
    alone = solo(tuple(request.prompt), request.max_tokens)
    assert len(request.output) == len(alone.tokens), request.finish
    for got, wanted, logits in zip(request.output, alone.tokens, alone.logits, strict=True):
        if got != wanted:
            gap = float(logits[wanted] - logits[got])
            # Each of the two logits may move by the noise: 4 of its standard deviations leave 1 in 10,000.
            assert gap <= 4 * 2**0.5 * rounding_noise(SMALL) * root_mean_square(logits)
            return  # another text from here on


def assert_everything_given_back(engine: Engine) -> None:
    while engine.prefixes.evict_oldest():
        pass
    deployment = engine.runner.deployment
    assert engine.runner.latents.free_pages == deployment.pool_pages
    assert engine.runner.states.free_slots == deployment.max_batch
    assert engine.unfinished == 0


PROMPTS = {f"r{i}": prompt_of(length, seed=i) for i, length in enumerate([5, 33, 1, 64, 20, 47])}

BACKENDS = pytest.mark.parametrize("backend", ["auto", "latency_specialized"])


def serve(engine: Engine, between: Callable[[int], None] = lambda step: None) -> None:
    """Add one prompt every other step, and call `between` after each step."""
    arriving, step = list(PROMPTS), 0
    while arriving or engine.unfinished:
        if arriving and step % 2 == 0:
            engine.add(arriving[0], PROMPTS[arriving.pop(0)], NEW_TOKENS)
        engine.step()
        between(step)
        step += 1


@BACKENDS
def test_requests_that_arrive_while_others_run_get_their_solo_answers(backend: str) -> None:
    engine = engine_of(decode_backend=backend)
    serve(engine)
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)
    assert_everything_given_back(engine)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_gives_the_solo_answers(chunk: int) -> None:
    engine = engine_of(prefill_chunk=chunk)
    serve(engine)
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)


@BACKENDS
def test_a_pool_too_small_for_all_preempts_and_still_gives_the_solo_answers(backend: str) -> None:
    engine = engine_of(decode_backend=backend, pages=6)
    serve(engine)
    assert sum(engine.request(request_id).preemptions for request_id in PROMPTS) > 0
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)
    assert_everything_given_back(engine)


@pytest.mark.parametrize("snapshots", [0, 8])
def test_a_request_preempted_at_any_moment_resumes_with_its_solo_answer(snapshots: int) -> None:
    for moment in (0, 1, 2, 5, 11):
        engine = engine_of(prefill_chunk=16, prefix_snapshots=snapshots)
        engine.add("r", PROMPTS["r1"], NEW_TOKENS)
        engine.add("mate", PROMPTS["r0"], NEW_TOKENS)
        for _ in range(moment + 1):
            engine.step()
        engine.preempt("r")
        assert not engine.request("r").running
        assert engine.request("r").pages == []
        engine.run()
        assert engine.request("r").preemptions == 1
        assert_solo_answer(engine, "r")
        assert_solo_answer(engine, "mate")
        assert_everything_given_back(engine)


def test_a_preempted_request_is_the_next_to_run() -> None:
    engine = engine_of(max_batch=1)
    engine.add("first", PROMPTS["r0"], NEW_TOKENS)
    engine.add("second", PROMPTS["r1"], NEW_TOKENS)
    engine.step()
    engine.preempt("first")
    engine.step()
    assert engine.request("first").running
    assert not engine.request("second").running


@BACKENDS
def test_aborts_give_everything_back_and_leave_the_others_their_answers(backend: str) -> None:
    engine = engine_of(decode_backend=backend, max_batch=3)

    def abort(step: int) -> None:
        if step == 6:
            assert engine.request("r1").running
            engine.abort("r1")
        if step == 10:
            assert not engine.request("r5").running
            engine.abort("r5")  # still waiting: three others hold the slots

    serve(engine, abort)
    for request_id in ("r1", "r5"):
        assert engine.request(request_id).finish is Finish.ABORT
    assert engine.request("r1").output != []
    assert engine.request("r5").output == []
    for request_id in ("r0", "r2", "r3", "r4"):
        assert_solo_answer(engine, request_id)
    assert_everything_given_back(engine)


def test_more_requests_than_slots_reuse_slots_and_get_their_solo_answers() -> None:
    engine = engine_of(max_batch=2, prefix_snapshots=0)
    serve(engine)
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)
    assert_everything_given_back(engine)


# Prefix reuse.


def logits_of_first_token(engine: Engine, request_id: str, prompt: Sequence[int]) -> Tensor:
    engine.add(request_id, prompt, 1)
    logits = torch.empty(0)
    while (result := engine.step()) is not None:
        logits = result.logits
    return logits


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_a_prompt_whose_prefix_is_cached_gives_the_bits_of_the_cold_run(kv_cache_dtype: str) -> None:
    engine, prompt = engine_of(kv_cache_dtype=kv_cache_dtype), prompt_of(80)
    cold = logits_of_first_token(engine, "cold", prompt)
    assert (engine.prefixes.hits, len(engine.prefixes)) == (0, 2)
    warm = logits_of_first_token(engine, "warm", prompt)
    assert engine.prefixes.hits == 1
    # 64 of 80 tokens are reused; the rest runs in one chunk of 16, as it did in the cold run.
    assert engine.runner.steps["generic"] == 3 + 1
    assert torch.equal(warm, cold)
    assert_everything_given_back(engine)


def test_a_prompt_that_shares_part_of_a_cached_one_reuses_the_longest_whole_block() -> None:
    engine, prompt = engine_of(), prompt_of(80)
    logits_of_first_token(engine, "cold", prompt)
    other = prompt[:40] + prompt_of(40, seed=9)
    assert other[40] != prompt[40]
    partial = logits_of_first_token(engine, "partial", other)
    assert engine.prefixes.hits == 1
    assert torch.equal(partial, logits_of_first_token(engine_of(), "alone", other))
    unrelated = prompt_of(80, seed=4)
    logits_of_first_token(engine, "unrelated", unrelated)
    assert engine.prefixes.hits == 1


def test_a_prompt_that_is_cached_whole_still_runs_its_last_block() -> None:
    engine, prompt = engine_of(), prompt_of(64)
    cold = logits_of_first_token(engine, "cold", prompt)
    assert torch.equal(logits_of_first_token(engine, "warm", prompt), cold)
    assert engine.prefixes.hits == 1
    assert engine.runner.steps["generic"] == 2 + 1


def test_a_cached_prefix_restores_exactly_the_state_after_its_last_token() -> None:
    engine, prompt = engine_of(), prompt_of(80)
    logits_of_first_token(engine, "cold", prompt)
    for boundary in (32, 64):
        entry = engine.prefixes.longest(prompt[: boundary + 1])
        assert entry is not None
        assert len(entry.tokens) == boundary
        assert len(entry.pages) == boundary // 16
        runner = runner_of()
        slot, pages = runner.states.allocate(), [runner.latents.allocate() for _ in range(boundary // 16)]
        for start in range(0, boundary, 32):
            runner.execute([Chunk(prompt[start : start + 32], start, slot, pages)])
        exact = runner.states.snapshot(slot)
        for saved, wanted in zip((*entry.state.conv, *entry.state.state), (*exact.conv, *exact.state), strict=True):
            assert torch.equal(saved, wanted)


def test_generated_text_is_reused_as_a_prefix_too() -> None:
    engine = engine_of()
    engine.add("first", PROMPTS["r4"], NEW_TOKENS + 8)  # 20 and 20 tokens: the boundary at 32 is generated
    engine.run()
    text = engine.request("first").tokens
    engine.add("next", text[:38], 3)
    engine.run()
    assert engine.prefixes.hits == 1
    assert_solo_answer(engine, "next")


def test_the_least_recently_used_prefix_is_dropped_first() -> None:
    engine = engine_of(prefix_snapshots=2)
    prompts = [prompt_of(40, seed) for seed in range(3)]
    for i, prompt in enumerate([*prompts[:2], prompts[0], prompts[2]]):
        logits_of_first_token(engine, str(i), prompt)
    assert engine.prefixes.hits == 1
    assert engine.prefixes.longest(prompts[1]) is None
    assert engine.prefixes.longest(prompts[0]) is not None


def test_cached_prefixes_yield_their_pages_before_a_request_is_preempted() -> None:
    engine = engine_of(pages=8)
    logits_of_first_token(engine, "old", prompt_of(70))  # leaves four pages in prefixes
    engine.add("new", prompt_of(100, seed=1), 4)
    engine.run()
    assert engine.request("new").preemptions == 0
    assert engine.request("new").finish is Finish.LENGTH
    assert_everything_given_back(engine)


# What a request may not be, and requests that go wrong.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "request 'bad' has an empty prompt"),
        ([1, 320], 4, "request 'bad' has tokens outside 0..319"),
        ([-1], 4, "request 'bad' has tokens outside 0..319"),
        ([1], 0, "request 'bad' wants 0 tokens, at least 1 is needed"),
        ([1] * 100, 29, "request 'bad' needs 129 tokens, max_context is 128"),
        ([1] * 60, 5, "request 'bad' needs 5 pages, the pool has 4"),
    ],
)
def test_a_request_that_can_never_run_is_refused_in_one_line(prompt: list[int], max_tokens: int, message: str) -> None:
    engine = engine_of(pages=4)
    with pytest.raises(RequestError) as refusal:
        engine.add("bad", prompt, max_tokens)
    assert str(refusal.value) == message
    assert engine.unfinished == 0


def test_duplicate_unknown_and_ended_requests_are_refused_by_name() -> None:
    engine = engine_of()
    engine.add("a", [1, 2], 1)
    with pytest.raises(RequestError, match="request 'a' exists already"):
        engine.add("a", [3], 1)
    with pytest.raises(RequestError, match="request 'a' is not running"):
        engine.preempt("a")
    for call in (engine.request, engine.abort, engine.preempt):
        with pytest.raises(RequestError, match="request 'b' is unknown"):
            call("b")
    engine.run()
    with pytest.raises(RequestError, match=r"request 'a' has ended already \(length\)"):
        engine.abort("a")


def test_the_longest_request_that_fits_runs_to_its_end() -> None:
    engine = engine_of(pages=8)
    engine.add("full", prompt_of(120), 8)
    engine.run()
    assert len(engine.request("full").output) == 8


def test_a_stop_token_ends_the_text_and_is_part_of_it() -> None:
    prompt = tuple(PROMPTS["r1"])
    stop = solo(prompt).tokens[3]
    engine = engine_of(max_batch=1, prefix_snapshots=0)
    engine.add("r", prompt, NEW_TOKENS, stop_tokens=[stop])
    engine.run()
    assert engine.request("r").finish is Finish.STOP
    assert engine.request("r").output == solo(prompt).tokens[: solo(prompt).tokens.index(stop) + 1]


@BACKENDS
def test_a_request_with_nan_logits_ends_as_an_error_and_disturbs_nobody(backend: str) -> None:
    engine = engine_of(decode_backend=backend)

    def poison(step: int) -> None:
        if step == 7:
            slot = engine.request("r1").slot
            assert slot
            engine.runner.states.state[0, 0][slot] = torch.nan

    serve(engine, poison)
    assert engine.request("r1").finish is Finish.ERROR
    assert "NaN or infinity" in engine.request("r1").error
    assert 0 < len(engine.request("r1").output) < NEW_TOKENS
    for request_id in PROMPTS.keys() - {"r1"}:
        assert_solo_answer(engine, request_id)
    # The poisoned slot and pages serve the next request.
    engine.add("again", PROMPTS["r1"], NEW_TOKENS)
    engine.run()
    assert_solo_answer(engine, "again")
    assert_everything_given_back(engine)


def test_a_state_that_gave_nan_is_never_cached_as_a_prefix() -> None:
    engine, prompt = engine_of(), prompt_of(80)
    engine.add("poisoned", prompt, 4)
    engine.step()
    engine.runner.states.state[0, 0][engine.request("poisoned").slot] = torch.nan
    engine.run()
    assert engine.request("poisoned").finish is Finish.ERROR
    engine.add("next", prompt, 4)
    engine.run()
    assert_solo_answer(engine, "next")


# Seeded sampling, over scripted logits: what is drawn then depends on scheduling alone.


class ScriptedRunner(ModelRunner):
    """Logits of a row are a fixed random function of its token and position, and of nothing else."""

    def execute(self, chunks: Sequence[Chunk], all_logits: bool = False) -> StepResult:
        rows = []
        for chunk in chunks:
            seed = chunk.tokens[-1] * 100_003 + chunk.start + len(chunk.tokens)
            rows.append(torch.randn(SMALL.vocab_size, generator=torch.Generator().manual_seed(seed)))
        return StepResult(torch.stack(rows), "generic", [1] * len(rows))


def scripted_texts(pages: int | None, ids: Sequence[str], preempt_at: int = -1) -> tuple[dict[str, list[int]], int]:
    deployment = Deployment(max_batch=8, max_context=128, pages=pages, prefix_block=32, prefill_chunk=16)
    engine = Engine(ScriptedRunner(weights_of(), deployment))
    for request_id in ids:
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=int(request_id[1:]))
        engine.add(request_id, PROMPTS[request_id], NEW_TOKENS, sampling)
    step = 0
    while engine.step() is not None:
        if step == preempt_at:
            for request_id in ids:
                if engine.request(request_id).running:
                    engine.preempt(request_id)
        step += 1
    assert_everything_given_back(engine)
    preemptions = sum(engine.request(request_id).preemptions for request_id in ids)
    return {request_id: engine.request(request_id).output for request_id in ids}, preemptions


def test_seeded_texts_are_the_same_alone_in_a_batch_and_after_preemption() -> None:
    alone = {request_id: scripted_texts(None, [request_id])[0][request_id] for request_id in PROMPTS}
    assert len({tuple(text) for text in alone.values()}) == len(alone)
    assert scripted_texts(None, list(PROMPTS))[0] == alone
    assert scripted_texts(None, list(reversed(PROMPTS)))[0] == alone
    for pages, preempt_at in ((6, -1), (None, 9)):
        texts, preemptions = scripted_texts(pages, list(PROMPTS), preempt_at)
        assert preemptions > 0
        assert texts == alone


def test_an_engine_that_can_run_nothing_says_so() -> None:
    engine = engine_of()
    while engine.runner.latents.free_pages:
        engine.runner.latents.allocate()
    engine.add("starved", [1, 2, 3], 2)
    with pytest.raises(CacheFull, match="1 requests wait for pages, 0 of"):
        engine.step()
