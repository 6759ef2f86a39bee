"""Faults of sampling, acceptance rules and evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("sampling and evals", gate="evals", kind=Kind.SAMPLING)

SAMPLE = partial(LAYER.engine, "sample", gate="parity")


@SAMPLE(
    "sample-constant-seed",
    "every position draws the same random number",
    sources="M131",
    missed_by="the distribution of single tokens",
)
def _seed(right: Any) -> Any:
    return lambda logits, params, position: right(logits, params, 0)


@SAMPLE(
    "sample-temperature-ignored",
    "temperature silently replaced by 1",
    sources="M137",
    missed_by="greedy decoding",
)
def _temperature(right: Any) -> Any:
    def faulty(logits: Any, params: Any, position: int) -> Any:
        return right(logits * params.temperature if params.temperature else logits, params, position)

    return faulty


for _component, _id, _title, _sources, _missed in (
    ("scorer", "eval-first-repeat-only", "of several repeats only the first is scored", "M142", "the headline score"),
    ("scorer", "eval-underpowered", "a difference within noise is reported as a regression", "M132",
     "the headline score"),
    ("tests", "eval-oracle-shares-layout", "oracle and kernel derive from the same wrong layout", "M138",
     "self-consistency"),
    ("tests", "eval-test-not-registered", "a test is not in the list that runs", "M140", "green results"),
    ("tests", "eval-checker-axis", "a checker indexes the wrong axis and reads padding", "M141", "anecdote"),
):  # fmt: skip
    LAYER.declare(_component, _id, _title, kind=Kind.ACCOUNTING, sources=_sources, missed_by=_missed)
LAYER.declare(
    "expert dispatch",
    "moe-padding-dispatched",
    "padded rows are dispatched to experts on other ranks",
    kind=Kind.MASK,
    gate="parity",
    sources="M52",
    missed_by="outputs",
    not_applicable="experts are not dispatched: every rank runs the whole bin, and a padded row's result is dropped",
)
