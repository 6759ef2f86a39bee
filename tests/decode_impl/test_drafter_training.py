"""The drafter's training: what it listens to is what the engine taps, and what it learns is what is stored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import HandDriven, rounding_noise
from torch import Tensor

from decode_impl.checkpoint import Checkpoint, load_checkpoint
from decode_impl.deployment import Deployment
from decode_impl.drafter.checkpoint import load_drafter, save_drafter
from decode_impl.drafter.config import DrafterConfig
from decode_impl.drafter.model import DrafterModel, stored_as_mxfp4
from decode_impl.embedded import EMBEDDED_DRAFTER, EMBEDDED_MODEL
from decode_impl.engine import Engine
from decode_impl.parts import PARTS
from decode_impl.runner import ModelRunner
from decode_impl.training.model import K3Text
from decode_impl.training.restore import restore
from decode_impl.training.train_drafter import DrafterOptimiser, acceptance, block_loss, finish, listen, quantise
from decode_impl.weights import ModelWeights, shard_weights
from evals.items import aime, gpqa
from evals.items.base import Item, Message
from evals.items.shards import EOS, chat_tokens
from numerics.metrics import error_stats

TINY = DrafterConfig(320, 192, taps=(2, 8), layers=1, latent_size=32, heads=2, mlp_size=32, markov_rank=4)


@cache
def embedded() -> tuple[Checkpoint, ModelWeights, K3Text]:
    checkpoint = load_checkpoint(EMBEDDED_MODEL)
    target = restore(checkpoint.config, checkpoint.tensors).eval().requires_grad_(False)
    return checkpoint, shard_weights(checkpoint.config, checkpoint.tensors), target


def tokens_of(messages: list[Message]) -> list[int]:
    return [int(token) & 511 for part in chat_tokens(messages, 0) for token in part]


def questions() -> list[tuple[list[int], Item]]:
    items = [aime.item("eval", 3), gpqa.item("eval", 5), aime.item("eval", 8)]
    chats = [aime.messages(items[0].row), gpqa.messages(items[1].row, 0), aime.messages(items[2].row)]
    return [(tokens_of(chat), item) for chat, item in zip(chats, items, strict=True)]


def answers(drafts: int, backend: str = "auto") -> tuple[list[list[int]], Engine]:
    deployment = Deployment(decode_backend=backend, max_batch=4, max_context=512, drafts=drafts)
    drafter = load_drafter(EMBEDDED_DRAFTER) if drafts else None
    engine = Engine(ModelRunner(embedded()[1], deployment, drafter=drafter))
    for i, (prompt, item) in enumerate(questions()):
        engine.add(str(i), prompt, len(item.target) + 8, stop_tokens=[EOS])
    engine.run()
    return [engine.request(str(i)).output for i in range(len(questions()))], engine


class Eavesdropper:
    """Stands in for a drafter: keeps what the runner lets it observe, and drafts nothing."""

    taps = (1, 4, 6, 8)

    def __init__(self, *_: Any) -> None:
        self.seen: list[list[Tensor]] = []

    def observe(self, taps: list[Tensor], *_: Any) -> None:
        self.seen.append([tap.clone() for tap in taps])


def test_training_model_and_engine_agree_on_logits_and_taps_though_they_share_no_code() -> None:
    checkpoint, weights, target = embedded()
    prompt, item = questions()[0]
    tokens = [*prompt, *item.target.encode()][:160]
    parts = {**PARTS, "drafter": Eavesdropper}
    deployment = Deployment(max_batch=1, max_context=256, drafts=1)
    runner = ModelRunner(weights, deployment, parts=parts, drafter=load_drafter(EMBEDDED_DRAFTER))
    logits = HandDriven(runner, tokens).run(len(tokens))
    text = torch.tensor([tokens])
    told = listen(target, text, Eavesdropper.taps)
    expected = target(text)[0].float()
    # Both round to BF16, at places of their own: independent roundings. The median over rows leaves out rows in which
    # a near-tied expert changed sides.
    noise = rounding_noise(checkpoint.config)
    ratios = [error_stats(a, b).rmse_ratio for a, b in zip(logits, expected, strict=True)]
    assert torch.tensor(ratios).median() < noise
    eavesdropper: Any = runner.drafter
    for mine, theirs in zip(told.taps, eavesdropper.seen[0], strict=True):
        ratios = [error_stats(a, b).rmse_ratio for a, b in zip(theirs, mine[0], strict=True)]
        assert torch.tensor(ratios).median() < noise
    assert float(torch.tensor(ratios).median()) > 0  # two programs, not one
    assert bool((told.own[0, 1:] == (expected[:-1].argmax(-1) == text[0, 1:])).all())


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_k3_minis_drafter_leaves_its_answers_alone_and_commits_over_3_tokens_a_step(backend: str) -> None:
    plain, _ = answers(0, backend)
    drafted, engine = answers(7, backend)
    assert drafted == plain
    assert engine.speculator.acceptance.length > 3


def test_the_acceptance_that_training_reports_is_what_the_engine_measures() -> None:
    _, _, target = embedded()
    drafter = load_drafter(EMBEDDED_DRAFTER)
    outputs, engine = answers(7)
    reported = []
    for (prompt, _), output in zip(questions(), outputs, strict=True):
        text = torch.tensor([[*prompt, *output]])
        answer = torch.arange(text.shape[1])[None] >= len(prompt)
        reported.append(acceptance(drafter, target, text, answer)[7])
    # Steps at an answer's end count by what is left of it in both; a near-tied draft may fall either way.
    assert sum(reported) / len(reported) == pytest.approx(engine.speculator.acceptance.length, rel=0.1)


def test_a_finished_drafter_holds_the_values_that_its_checkpoint_stores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = DrafterModel(TINY)
    quantise(drafter)
    shown = drafter.context_proj.detach().clone()
    finish(drafter)
    assert torch.equal(drafter.context_proj, shown)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    names = [name for name in loaded.state_dict() if stored_as_mxfp4(name)]
    assert len(names) == 8
    for name in names:
        assert torch.equal(loaded.state_dict()[name], drafter.state_dict()[name])


def test_a_drafter_learns_its_target_and_never_changes_it() -> None:
    _, _, target = embedded()
    prompt, item = questions()[0]
    text = torch.tensor([[*prompt[-16:], *item.target.encode()[:32]]])
    weights = (torch.arange(text.shape[1])[None] >= 16).float()
    before = target.lm_head.clone()
    torch.manual_seed(0)
    drafter = DrafterModel(replace(TINY, max_drafts=3))
    quantise(drafter)
    optimiser = DrafterOptimiser(drafter, matrix_rate=0.05, other_rate=0.02)
    losses = []
    for _ in range(20):
        torch.manual_seed(1)  # the same anchors every time
        loss, length = block_loss(drafter, target, text, weights, count=16)
        loss.backward()
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert float(length) > 1
    assert torch.equal(target.lm_head, before)


def test_tokens_that_are_not_the_targets_own_are_not_taught() -> None:
    _, _, target = embedded()
    prompt, _ = questions()[0]
    foreign = [ord("~")] * 40
    text = torch.tensor([[*prompt, *foreign]])
    weights = (torch.arange(text.shape[1])[None] >= len(prompt) + 2).float()
    told = listen(target, text, TINY.taps)
    if bool(told.own[0, len(prompt) + 3 :].any()):
        pytest.skip("the model came to like the foreign text")
    drafter = DrafterModel(TINY)
    loss, length = block_loss(drafter, target, text, weights, count=8)
    assert float(loss.detach()) == 0
    assert float(length) == 1
