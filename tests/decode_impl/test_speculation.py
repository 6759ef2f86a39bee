"""Speculation: a verify step is the decode steps it stands for, and drafts never change a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2_contingency, chisquare
from small_models import SMALL, HandDriven, prompt_of, relative_rms, rounding_noise, runner_of, weights_of
from test_engine import NEW_TOKENS, PROMPTS, assert_everything_given_back, assert_solo_answer, serve, solo
from torch import Tensor

from decode_impl.acceptance import Acceptance
from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment, DeploymentError
from decode_impl.drafter.checkpoint import load_drafter, save_drafter
from decode_impl.drafter.config import DrafterConfig, DrafterError
from decode_impl.drafter.drafter import NO_DRAFT, Drafter
from decode_impl.drafter.model import DrafterModel, stored_as_mxfp4
from decode_impl.engine import Engine
from decode_impl.parts import PARTS
from decode_impl.request import Finish, Request
from decode_impl.runner import GENERIC, SPECIALIZED, ModelRunner
from decode_impl.sampling import SamplingParams, distribution
from decode_impl.speculator import Speculator, _draw_drafts
from numerics.formats import mxfp4_dequantise, mxfp4_quantise

FAST = "latency_specialized"
BACKENDS = pytest.mark.parametrize("backend", ["auto", FAST])
DRAFTER = DrafterConfig(
    SMALL.vocab_size, SMALL.hidden_size, taps=(2, 4), latent_size=32, heads=2, mlp_size=32, markov_rank=4
)


def drafter_of(config: DrafterConfig = DRAFTER, seed: int = 0) -> DrafterModel:
    torch.manual_seed(seed)
    model = DrafterModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = mxfp4_dequantise(*mxfp4_quantise(parameter)) if stored_as_mxfp4(name) else parameter.bfloat16()
            parameter.copy_(stored)
    return model.requires_grad_(False)


class OracleDrafter:
    """Drafts what each request says alone, wrong at planned places, and nothing at all at others."""

    taps: tuple[int, ...] = ()
    following: ClassVar[dict[tuple[int, int], list[int]]] = {}

    def __init__(self, *_: Any) -> None:
        self.cache = torch.zeros(0)

    def observe(self, *_: Any) -> None: ...

    def draft(self, anchors: Tensor, places: Tensor, table: Tensor, count: int) -> Tensor:
        rows = []
        for anchor, place in zip(anchors.tolist(), places.tolist(), strict=True):
            known = [*self.following.get((place, anchor), []), *[7] * count][:count]
            wrong = [token if (place * 5 + j) % 7 else (token + 1) % 256 for j, token in enumerate(known)]
            rows.append([NO_DRAFT] * count if place % 5 == 0 else wrong)
        return torch.tensor(rows)


def speculative_engine(backend: str = "auto", drafts: int = 7, **options: Any) -> Engine:
    for prompt in PROMPTS.values():
        text = [*prompt, *solo(tuple(prompt)).tokens]
        OracleDrafter.following |= {(i, text[i]): text[i + 1 :] for i in range(len(prompt), len(text))}
    defaults = {"max_batch": 8, "max_context": 128, "page_size": 16, "prefix_block": 32}
    deployment = Deployment(decode_backend=backend, drafts=drafts, **(defaults | options))
    parts = {**PARTS, "drafter": OracleDrafter}
    return Engine(ModelRunner(weights_of(), deployment, parts=parts, drafter=drafter_of()))


# A verify step.


def verify_chunk(request: HandDriven, width: int) -> Chunk:
    start = request.computed
    return Chunk(
        request.tokens[start : start + width],
        start,
        request.slot,
        tuple(request.pages),
        targets=range(request.slot, request.slot + width),
    )


@BACKENDS
@pytest.mark.parametrize("width", range(2, 9))
def test_verify_logits_and_states_are_those_of_as_many_decode_steps(backend: str, width: int) -> None:
    prompts = [prompt_of(30 + width, seed=i) for i in range(3)]
    options = {"decode_backend": backend, "drafts": 7, "max_batch": 4}
    runner = runner_with_drafter(**options)
    requests = [HandDriven(runner, prompt) for prompt in prompts]
    for request in requests:
        runner.execute([request.chunk(30)])
    result = runner.execute([verify_chunk(request, width) for request in requests])
    assert result.path == (SPECIALIZED if backend != "auto" and width >= 4 else GENERIC)
    for request, verified in zip(requests, result.by_chunk(), strict=True):
        alone = HandDriven(runner_with_drafter(**options), request.tokens)
        alone.run(30)
        noise = 2 * rounding_noise(SMALL)
        for token in range(width):
            logits = alone.runner.execute([alone.chunk(1)]).logits[0]
            assert relative_rms(verified[token], logits) < noise
            for key, pool in alone.runner.states.state.items():
                after = runner.states.state[key][request.slot + token]
                assert relative_rms(after, pool[alone.slot]) < noise
            for key, pool in alone.runner.states.conv.items():
                after = runner.states.conv[key][request.slot + token]
                assert relative_rms(after, pool[alone.slot]) < noise


def runner_with_drafter(**options: Any) -> ModelRunner:
    defaults = {"max_batch": 8, "max_context": 128, "page_size": 16, "prefix_block": 32}
    return ModelRunner(weights_of(), Deployment(**(defaults | options)), drafter=drafter_of())


@BACKENDS
def test_a_verify_step_writes_only_the_slots_and_rows_of_its_requests(backend: str) -> None:
    runner = runner_with_drafter(decode_backend=backend, drafts=4, max_batch=4)
    first, other = HandDriven(runner, prompt_of(40)), HandDriven(runner, prompt_of(40, seed=1))
    runner.execute([first.chunk(30)])
    runner.execute([other.chunk(30)])
    pools = {**runner.states.state, **{("conv", *key): pool for key, pool in runner.states.conv.items()}}
    before = {key: pool.clone() for key, pool in pools.items()}
    latents = {key: pool.clone() for key, pool in runner.latents.layers.items()}
    runner.execute([verify_chunk(first, 4)])  # of 5 columns, 4 are written
    written = set(range(first.slot, first.slot + 4))
    for key, pool in pools.items():
        changed = {i for i in range(pool.shape[0]) if not torch.equal(pool[i], before[key][i])}
        assert changed == written
    rows = {first.pages[i // 16] * 16 + i % 16 for i in range(30, 34)}
    for key, pool in runner.latents.layers.items():
        flat, old = pool.flatten(0, 1), latents[key].flatten(0, 1)
        assert {i for i in range(flat.shape[0]) if not torch.equal(flat[i], old[i])} == rows


# The engine.


@pytest.mark.parametrize(("backend", "drafts"), [("auto", 1), ("auto", 7), (FAST, 3), (FAST, 7)])
def test_greedy_text_with_drafts_is_greedy_text_without(backend: str, drafts: int) -> None:
    engine = speculative_engine(backend, drafts)
    serve(engine)
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)
    accepted = {count for (_, count) in engine.speculator.acceptance.steps}
    assert accepted >= {0, 1, min(drafts, 3)}
    assert_everything_given_back(engine)
    assert (engine.runner.steps[SPECIALIZED] > 0) == (backend != "auto")


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_seeded_text_with_drafts_is_seeded_text_without(temperature: float) -> None:
    texts = []
    for drafts in (0, 5):
        engine = speculative_engine(drafts=drafts)
        for seed, (request_id, prompt) in enumerate(PROMPTS.items()):
            engine.add(request_id, prompt, NEW_TOKENS, SamplingParams(temperature, seed=seed))
        engine.run()
        texts.append([engine.request(request_id).output for request_id in PROMPTS])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(PROMPTS) - 1  # a draw within the rounding of a boundary may fall on the other side


def test_text_from_drawn_drafts_is_seeded_and_follows_the_target() -> None:
    """The drafter here is random, so nearly every draft is replaced: the rest of `p` must carry the text."""
    prompt, draws = PROMPTS["r2"], 150
    options = {"max_batch": 8, "max_context": 32, "page_size": 16, "prefix_snapshots": 0, "prefix_block": 16}
    counts = []
    for drafts in (0, 1):
        deployment = Deployment(drafts=drafts, draft_sampling="sampled", **options)
        engine = Engine(ModelRunner(weights_of(), deployment, drafter=drafter_of() if drafts else None))
        for seed in range(draws):
            engine.add(str(seed), prompt, 3, SamplingParams(temperature=0.4, seed=seed))
        engine.run()
        counts.append(
            torch.tensor([engine.request(str(seed)).output[1] for seed in range(draws)]).bincount(minlength=320)
        )
        if drafts:
            assert engine.speculator.acceptance.length < 1.5
    # Two samples of one distribution: tokens seen often enough, all others together.
    often = (counts[0] + counts[1]) >= 10
    table = torch.stack([torch.cat([c[often], c[~often].sum()[None]]) for c in counts])
    assert chi2_contingency(table[:, table.sum(0) > 0].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("preempt_at", [4, 9])
def test_a_preempted_request_loses_its_drafts_and_its_column_but_not_its_text(preempt_at: int) -> None:
    def between(step: int) -> None:
        if step == preempt_at:
            for request_id in PROMPTS:
                if request_id in engine._requests and engine.request(request_id).running:
                    engine.preempt(request_id)
                    assert not engine.request(request_id).drafts

    engine = speculative_engine()
    serve(engine, between)
    for request_id in PROMPTS:
        assert_solo_answer(engine, request_id)


def test_nobody_is_preempted_for_the_sake_of_drafts() -> None:
    """Requests that just fit without drafts also fit with them: drafts take free pages only, and give them back."""
    preemptions = []
    for drafts in (0, 7):
        engine = speculative_engine(drafts=drafts, pages=3, max_batch=2, prefix_snapshots=0)
        engine.add("long", PROMPTS["r4"][:12], 14)
        engine.add("short", PROMPTS["r4"][:15], 3)
        engine.run()
        preemptions.append([engine.request(name).preemptions for name in ("long", "short")])
        assert_everything_given_back(engine)
    assert preemptions[0] == preemptions[1] == [0, 0]


def test_verify_steps_say_what_was_committed() -> None:
    engine = speculative_engine()
    engine.add("r4", PROMPTS["r4"], NEW_TOKENS)
    engine.run()
    request = engine.request("r4")
    single = engine.runner.steps[GENERIC] - len(request.verify_steps) - 1  # one step is the prompt's
    committed = sum(accepted + 1 for _, _, accepted in request.verify_steps)
    assert committed + single + 1 == NEW_TOKENS
    assert sum(engine.speculator.acceptance.steps.values()) == len(request.verify_steps)


def test_a_prefix_that_ends_inside_a_verify_step_is_cached_with_the_state_of_its_column() -> None:
    prompt = PROMPTS["r1"]  # 33 tokens: with 12 more the boundary at 40 falls among drafts
    engine = speculative_engine(prefix_block=8, page_size=8)
    engine.add("r1", prompt, NEW_TOKENS)
    engine.run()
    text = [*prompt, *engine.request("r1").output]
    entry = engine.prefixes.longest(text[:41])
    assert entry is not None
    assert len(entry.tokens) == 40
    alone = HandDriven(runner_of(), text)
    alone.run(33, *[1] * 7)
    for saved, pool in zip(entry.state.state, alone.runner.states.state.values(), strict=True):
        assert relative_rms(saved, pool[alone.slot]) < 2 * rounding_noise(SMALL)


def test_a_stop_token_among_accepted_drafts_ends_the_text_there() -> None:
    prompt = tuple(PROMPTS["r3"])
    stop = solo(prompt).tokens[4]
    expected = solo(prompt).tokens[: solo(prompt).tokens.index(stop) + 1]
    engine = speculative_engine()
    engine.add("r3", prompt, NEW_TOKENS, stop_tokens=[stop])
    engine.run()
    assert engine.request("r3").output == expected
    assert engine.request("r3").finish == Finish.STOP


def test_drafts_never_carry_a_text_past_max_tokens() -> None:
    engine = speculative_engine()
    for tokens in range(1, 10):
        engine.add(str(tokens), PROMPTS["r4"], tokens)
    engine.run()
    for tokens in range(1, 10):
        assert engine.request(str(tokens)).output == solo(tuple(PROMPTS["r4"])).tokens[:tokens]


def test_a_request_whose_logits_are_nan_ends_with_an_error_among_healthy_verify_steps() -> None:
    engine = speculative_engine()
    engine.add("r1", PROMPTS["r1"], NEW_TOKENS)
    engine.add("r4", PROMPTS["r4"], NEW_TOKENS)
    while len(engine.request("r4").output) < 3:
        engine.step()
    sick = engine.request("r4")
    for pool in engine.runner.states.state.values():
        pool[sick.slot + sick.column] = math.nan
    engine.run()
    assert sick.finish == Finish.ERROR
    assert "NaN" in sick.error
    assert sum(accepted + 1 for _, _, accepted in sick.verify_steps) < len(sick.output)  # a NaN step commits nothing
    assert_solo_answer(engine, "r1")


def test_a_drafter_that_goes_mad_for_one_row_costs_its_request_the_drafts_and_nobody_the_engine() -> None:
    model = drafter_of()
    with torch.no_grad():
        model.markov_in[:] = 1e3
        model.markov_out[:] = 3e38
    for sampling in ("greedy", "sampled"):
        deployment = Deployment(drafts=3, draft_sampling=sampling, max_batch=2, max_context=64, prefix_snapshots=0)
        engine = Engine(ModelRunner(weights_of(), deployment, drafter=model))
        engine.add("r0", PROMPTS["r0"], 4, SamplingParams(temperature=0.5))
        engine.run()
        assert engine.request("r0").finish == Finish.LENGTH
        assert not engine.request("r0").verify_steps


class _Fixed:
    """A runner of which the speculator needs only its parts."""

    parts = PARTS


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_drawn_drafts_commit_the_targets_joint_distribution(temperature: float) -> None:
    """Two rows, four tokens, four thousand seeds: the drafts' own numbers, rows and seeds all matter."""
    generator = torch.Generator().manual_seed(4)
    p_logits, q_logits = (torch.randn(3, 4, generator=generator) * 1.5 for _ in range(2))
    counts = torch.zeros(4, 4)
    speculator = Speculator.__new__(Speculator)
    speculator.runner = _Fixed()  # type: ignore[assignment]
    for seed in range(4000):
        request = Request("r", [0], 3, SamplingParams(temperature, seed=seed), frozenset(), output=[1], computed=1)
        drafts = [int(_draw_drafts([request], row, q_logits[row : row + 1])[0]) for row in range(2)]
        first = speculator.choose(request, p_logits[0], 2, 0, drafts[0])
        if first == drafts[0]:
            second = speculator.choose(request, p_logits[1], 3, 1, drafts[1])
        else:
            second = speculator.choose(request, p_logits[1], 3, 0, None)
        counts[first, second] += 1
    rows = [distribution(p_logits[i], SamplingParams(temperature), 0) for i in range(2)]
    expected = (rows[0][:, None] * rows[1]) * 4000
    assert chisquare(counts.flatten().tolist(), expected.flatten().tolist()).pvalue > 1e-3


# The drafter.


def test_a_drafter_drafts_the_same_alone_and_in_a_batch_whatever_lies_behind_the_anchor() -> None:
    torch.manual_seed(0)
    drafter = Drafter(drafter_of(), weights_of(), pages=8, page_size=4)
    taps = [torch.randn(12, SMALL.hidden_size) for _ in range(2)]
    positions = torch.arange(4, 16)  # pages 1, 2, 3
    drafter.observe(taps, positions, torch.arange(12))
    table = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 4]])
    anchors, places = torch.tensor([5, 9]), torch.tensor([9, 12])
    together = drafter.draft(anchors, places, table, 7)
    drafter.cache[3, 1:] = math.nan  # places 9 and later: not yet verified for the first request
    alone = drafter.draft(anchors[:1], places[:1], table[:1], 7)
    assert torch.equal(together[:1], alone)
    assert bool((alone != NO_DRAFT).all())
    assert bool((drafter.draft(anchors[1:], places[1:], table[1:], 7) == NO_DRAFT).all())


def test_padding_never_writes_the_drafters_null_page() -> None:
    drafter = Drafter(drafter_of(), weights_of(), pages=2, page_size=4)
    drafter.observe([torch.randn(3, SMALL.hidden_size)] * 2, torch.tensor([0, 5, 3]), torch.tensor([0, 1, 0]))
    changed = drafter.cache.flatten(0, 1).ne(0).any(-1).nonzero().squeeze(-1).tolist()
    assert changed == [5]


def test_a_block_sees_its_rows_and_the_context_before_its_anchor_only() -> None:
    torch.manual_seed(1)
    model = drafter_of(seed=1)
    context, embedded = torch.randn(1, 10, DRAFTER.row), torch.randn(1, 2, SMALL.hidden_size)
    places, last = torch.tensor([[4, 8]]), torch.randn(1, 2, DRAFTER.latent_size)
    hidden = model.block_hidden(embedded, last, places, context, 7)
    changed = context.clone()
    changed[:, 4:] += 1
    again = model.block_hidden(embedded, last, places, changed, 7)
    assert torch.equal(hidden[:, 0], again[:, 0])
    assert not torch.equal(hidden[:, 1], again[:, 1])


def test_a_saved_drafter_loads_with_the_same_parameters(tmp_path: Any) -> None:
    model = drafter_of()
    save_drafter(model, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "other"}', "model_type"),
        ("config.json", DRAFTER.to_json().replace('"heads": 2', '"heads": 0'), "heads is 0"),
        ("config.json", DRAFTER.to_json().replace('"latent_size": 32', '"latent_size": 8'), "latent_size is 8"),
        ("config.json", DRAFTER.to_json().replace('"heads": 2', '"heads": 2, "x": 1'), "unknown fields x"),
        ("config.json", DRAFTER.to_json().replace('"latent_size": 32', '"latent_size": 64'), "context_proj_packed is"),
        ("config.json", DRAFTER.to_json().replace('"heads": 2', '"heads": 2.0'), "heads is 2.0"),
        ("config.json", DRAFTER.to_json().replace('"max_drafts": 7', '"max_drafts": 1000000000000'), "max_drafts is"),
        ("config.json", DRAFTER.to_json().replace("10000.0", "Infinity"), "rope_theta is inf"),
        ("config.json", DRAFTER.to_json().replace('"head_dim": 32', '"head_dim": 33'), "head_dim is 33"),
        ("config.json", DRAFTER.to_json().replace("  2,\n", "  true,\n"), "taps are"),
        ("config.json", DRAFTER.to_json().replace("  2,\n", "  5,\n"), "taps are"),
        ("config.json", "[" * 100_000, "config.json"),
        ("model.safetensors", "nonsense", "model.safetensors"),
    ],
)
def test_a_drafter_that_cannot_be_used_is_refused_with_what_is_wrong(
    tmp_path: Any, file: str, content: str, message: str
) -> None:
    save_drafter(drafter_of(), tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(DrafterError, match=message):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("output_norm", torch.full([64], math.nan, dtype=torch.bfloat16), "output_norm holds NaN"),
        ("output_norm", torch.ones(64), "output_norm is"),
        ("context_proj_scale", torch.ones(32, 4, dtype=torch.int64), "context_proj_scale is"),
        ("extra", torch.ones(1), "extra is"),
    ],
)
def test_drafter_weights_that_are_not_what_the_config_says_are_refused(
    tmp_path: Any, name: str, tensor: Tensor, message: str
) -> None:
    save_drafter(drafter_of(), tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), name: tensor}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=message):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(DRAFTER, vocab_size=7), "its vocabulary is 7"),
        (replace(DRAFTER, hidden_size=32), "its hidden size is 32"),
        (replace(DRAFTER, taps=(9,)), r"taps \(9,\), the model has 4 layers"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(config: DrafterConfig, message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        Drafter(drafter_of(config), weights_of(), pages=2, page_size=4)


@pytest.mark.parametrize(("drafts", "model", "message"), [(3, None, "no drafter"), (8, "a", "at most 7")])
def test_drafts_without_a_drafter_that_makes_them_are_refused(drafts: int, model: str | None, message: str) -> None:
    deployment = Deployment(drafts=drafts, max_batch=1, max_context=32)
    with pytest.raises(DeploymentError, match=message):
        ModelRunner(weights_of(), deployment, drafter=drafter_of() if model else None)


def test_acceptance_counts_full_steps_and_their_positions() -> None:
    acceptance = Acceptance(3)
    steps: Sequence[tuple[int, int]] = [(3, 0), (3, 3), (3, 1), (2, 2)]
    for drafted, accepted in steps:
        acceptance.count(drafted, accepted)
    assert acceptance.length == pytest.approx((1 + 4 + 2) / 3)
    assert acceptance.by_position() == pytest.approx([2 / 3, 1 / 3, 1 / 3])
