"""Fail-stop: a rank that disagrees or does not answer ends the step with its name, and the engine runs no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from small_models import engine_of, prompt_of

from decode_impl.batch import Chunk
from decode_impl.engine import Engine, EngineStopped
from decode_impl.parallel.errors import CollectiveError, RankDisagreed, RankTimeout
from decode_impl.runner import StepResult
from decode_impl.specialized.plan import Decision, Fallback, plan


def working(ranks: int = 2) -> Engine:
    """An engine in the middle of a request: two steps are done."""
    engine = engine_of(tensor_parallel=ranks)
    engine.add("only", prompt_of(5), 8)
    engine.step()
    engine.step()
    return engine


def stops(engine: Engine, kind: type[CollectiveError], text: str) -> None:
    """The next step raises, the ones behind it are refused with the same reason, and nothing is committed."""
    before = list(engine.request("only").output)
    with pytest.raises(kind, match=text):
        engine.step()
    for _ in range(2):
        with pytest.raises(EngineStopped, match=f"runs no further step: {text}"):
            engine.step()
    assert engine.request("only").output == before


def test_a_rank_that_decides_otherwise_ends_the_step_and_the_engine_refuses_further_ones() -> None:
    engine = working()
    asked = 0

    def split(chunks: Sequence[Chunk], *rest: Any) -> Decision:
        nonlocal asked
        asked += 1
        return plan(chunks, *rest) if asked % 2 else Decision(None, Fallback.MIXED)

    engine.runner.parts = {**engine.runner.parts, "plan": split}
    stops(engine, RankDisagreed, "rank 1, slot 1, epoch 3: decided")


def test_a_rank_that_does_not_answer_ends_the_step_and_the_engine_refuses_further_ones() -> None:
    engine = working()

    def silent(chunks: Sequence[Chunk], all_logits: bool = False) -> StepResult:
        raise RankTimeout("rank 1 did not answer in time", rank=0, slot=1, epoch=3, source=1)

    engine.runner.execute = silent  # type: ignore[method-assign]
    stops(engine, RankTimeout, "rank 0, slot 1, epoch 3: rank 1 did not answer in time")


def test_an_error_that_is_no_ranks_leaves_the_engine_as_it_was() -> None:
    engine = working()
    execute = engine.runner.execute

    def unlucky(chunks: Sequence[Chunk], all_logits: bool = False) -> StepResult:
        engine.runner.execute = execute  # type: ignore[method-assign]
        raise OSError("something else")

    engine.runner.execute = unlucky  # type: ignore[method-assign]
    with pytest.raises(OSError, match="something else"):
        engine.step()
    engine.run()
    assert len(engine.request("only").output) == 8
