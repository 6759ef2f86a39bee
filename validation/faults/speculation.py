"""Faults of speculative decoding: rollback and acceptance, and what is not here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("speculation", gate="parity")

ENGINE = partial(LAYER.engine, "engine", kind=Kind.INDEX)


def _with_column(choose: Any) -> Any:
    """An engine whose state column after a verify step is `choose(right column, tokens of the step, column before)`."""

    def wrong(right: Any) -> Any:
        class Faulty(right):  # type: ignore[misc]
            def _commit_verified(self, request: Any, chunk: Any, logits: Any) -> int:
                before = request.column
                committed = super()._commit_verified(request, chunk, logits)
                request.column = choose(request.column, len(chunk.tokens), before)
                return int(committed)

        return Faulty

    return wrong


ENGINE(
    "spec-one-token-too-many",
    "rollback keeps one token too many",
    sources="M74",
    missed_by="outputs right after the step; a single event washes out (4 % at token 256)",
)(_with_column(lambda column, tokens, before: min(column + 1, tokens - 1)))

ENGINE(
    "spec-one-token-too-few",
    "rollback keeps one token too few",
    sources="M74",
    missed_by="steps without accepted drafts",
)(_with_column(lambda column, tokens, before: max(column - 1, 0)))

ENGINE(
    "spec-none-accepted-is-minus-one",
    "no accepted draft indexes column -1: the slot of another request",
    sources="M76",
    missed_by="high acceptance; batch size 1",
)(_with_column(lambda column, tokens, before: column or -1))

ENGINE(
    "spec-counts-of-last-step",
    "accepted counts of the step before are used",
    kind=Kind.STALE,
    sources="M107",
    missed_by="constant acceptance; synchronous scheduling",
)(_with_column(lambda column, tokens, before: min(before, tokens - 1)))


@ENGINE(
    "spec-accepted-count-kept",
    "a reused slot keeps its last owner's accepted count: the next request starts at that column",
    kind=Kind.STALE,
    sources="M62",
    missed_by="a reset test of state tensors alone; slots used once",
    equivalent="a slot is given out with all of its columns cleared, so a request finds nothing at whichever it starts",
)
def _count_kept(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def _release(self, request: Any) -> None:
            self.kept: dict[int, int] = {**getattr(self, "kept", {}), request.slot: request.column}
            super()._release(request)

        def _chunk(self, request: Any, length: int) -> Any:
            if request.computed == 0:
                request.column = getattr(self, "kept", {}).get(request.slot, 0)
            return super()._chunk(request, length)

    return Faulty


@ENGINE(
    "spec-column-zero",
    "a step without drafts reads column 0 after n were accepted",
    sources="M73",
    missed_by="constant draft counts; acceptance, which stays at 64 to 81 %",
)
def _column_zero(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def _chunk(self, request: Any, length: int) -> Any:
            if not request.drafts:
                request.column = 0
            return super()._chunk(request, length)

    return Faulty


@ENGINE(
    "spec-prefix-of-last-column",
    "a prefix whose boundary lies inside a verify step is saved with the state after its last draft",
    sources="M67, M68",
    missed_by="speculation off; boundaries between steps",
)
def _last_column(right: Any) -> Any:
    class Faulty(right):  # type: ignore[misc]
        def _keep_prefixes(self, request: Any, chunk: Any, committed: int, logits: Any) -> None:
            targets = (chunk.targets[-1],) * len(chunk.targets) if chunk.targets else ()
            super()._keep_prefixes(request, replace(chunk, targets=targets), committed, logits)

    return Faulty


@ENGINE(
    "spec-commit-differs-on-rerun",
    "where two requests run, every fifth commit of a process leaves another last bit in one word of the state",
    kind=Kind.RACE,
    sources="kind of M111",
    missed_by="any comparison within noise; a rerun of single ops, of steps without drafts, or of one request",
)
def _on_rerun(right: Any) -> Any:
    commits = itertools.count()

    class Faulty(right):  # type: ignore[misc]
        def _commit_verified(self, request: Any, chunk: Any, logits: Any) -> int:
            committed = super()._commit_verified(request, chunk, logits)
            if len(self._running) > 1 and next(commits) % 5 == 4:
                state = next(iter(self.runner.states.state.values()))
                state[request.slot + request.column].view(torch.int32).view(-1)[0] ^= 1
            return int(committed)

    return Faulty


@LAYER.engine(
    "build_batch",
    "spec-verify-rows-see-all",
    "every row of a verify step sees the keys of the last draft",
    kind=Kind.MASK,
    sources="M79",
    missed_by="one query row a request",
)
def _see_all(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        lengths = batch.lengths.clone()
        for rows in batch.verify:
            width = rows.targets.shape[1]
            own = lengths[rows.rows].view(-1, width)
            lengths[rows.rows] = own[:, -1:].expand_as(own).flatten()
        return replace(batch, lengths=lengths)

    return faulty


for _component, _id, _title, _sources, _missed, _absent in (
    ("grammar mask", "mask-rows-shifted", "mask rows assume a fixed draft count", "M96", "speculation off",
     "no grammar constrains what is sampled here: there are no mask rows"),
    ("captured graph", "graph-mode-corrupts", "another corruption by each graph mode at batch 1, cause open", "M93",
     "eager runs", "no path here captures graphs on a CPU, and the report names no cause to rebuild"),
):  # fmt: skip
    LAYER.declare(_component, _id, _title, kind=Kind.INDEX, sources=_sources, missed_by=_missed, not_applicable=_absent)
