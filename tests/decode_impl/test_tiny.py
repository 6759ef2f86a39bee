"""Start here: a tiny K3-family model with random weights decodes a few tokens on both paths."""

from __future__ import annotations

import pytest
from small_models import SMALL

from decode_impl.deployment import Deployment
from decode_impl.engine import Engine
from decode_impl.random_weights import random_checkpoint
from decode_impl.request import Finish
from decode_impl.runner import ModelRunner
from decode_impl.weights import shard_weights


@pytest.mark.parametrize(
    ("backend", "paths"),
    [
        ("auto", {"generic": 6}),  # one step of prefill, five of decode
        ("latency_specialized", {"generic": 1, "specialized": 5}),
    ],
)
def test_a_tiny_model_decodes_on_this_path(backend: str, paths: dict[str, int]) -> None:
    weights = shard_weights(SMALL, random_checkpoint(SMALL, seed=1).tensors)
    runner = ModelRunner(weights, Deployment(decode_backend=backend, max_batch=2, max_context=64))
    engine = Engine(runner)
    engine.add("hello", prompt=list(b"Hello, K3"), max_tokens=6)
    engine.run()
    request = engine.request("hello")
    assert request.finish is Finish.LENGTH
    assert len(request.output) == 6
    assert all(0 <= token < SMALL.vocab_size for token in request.output)
    assert dict(runner.steps) == paths
