"""Faults of speculative decoding: verify steps, rollback, the drafter, acceptance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("speculation", gate="parity")

VERIFY = partial(LAYER.op, "kda_verify", gate="numerics")


@VERIFY(
    "verify-beta-misaligned",
    "beta of odd drafts loaded from the 16-byte boundary below it (6 heads a rank)",
    kind=Kind.LAYOUT,
    sources="M14",
    missed_by="4, 8, 12 or 16 heads a rank; even drafts",
)
def _misaligned(op: Any, *, proj: Tensor, state: Tensor, targets: Tensor, **rest: Any) -> Any:
    h, width = state.shape[1], targets.shape[1]
    beta = proj.view(-1, width, proj.shape[1])[..., -h:].flatten(1)
    read = beta.clone()
    for draft in range(width):
        start = draft * h // 4 * 4
        read[:, draft * h : (draft + 1) * h] = beta[:, start : start + h]
    wrong = proj.clone()
    wrong[:, -h:] = read.view(-1, h)
    return op(proj=wrong, state=state, targets=targets, **rest)


@VERIFY(
    "verify-snapshot-by-slot",
    "states of the drafts written to rows counted from the slot, not from the batch",
    kind=Kind.INDEX,
    sources="M08",
    missed_by="slots that equal their row",
)
def _by_slot(op: Any, *, sources: Tensor, targets: Tensor, state: Tensor, **rest: Any) -> Any:
    moved = (sources[:, None] + torch.arange(targets.shape[1])).clamp_max(state.shape[0] - 1)
    return op(sources=sources, targets=torch.where(targets > 0, moved, targets), state=state, **rest)


@VERIFY(
    "verify-state-one-late",
    "every draft's slot holds the state after the draft before it",
    kind=Kind.INDEX,
    sources="M73, M74",
    missed_by="outputs of the step",
)
def _one_late(op: Any, *, targets: Tensor, state: Tensor, sources: Tensor, **rest: Any) -> Any:
    y = op(targets=targets, state=state, sources=sources, **rest)
    live = (sources > 0).nonzero().flatten()
    for draft in range(targets.shape[1] - 1, 0, -1):
        state[targets[live, draft]] = state[targets[live, draft - 1]]
    return y


@VERIFY(
    "verify-conv-not-rolled",
    "the convolution window is kept once for all drafts",
    kind=Kind.STALE,
    sources="M73, M74",
    missed_by="a check of the recurrent tensor alone",
)
def _conv(op: Any, *, targets: Tensor, conv_state: Tensor, sources: Tensor, **rest: Any) -> Any:
    y = op(targets=targets, conv_state=conv_state, sources=sources, **rest)
    live = (sources > 0).nonzero().flatten()
    conv_state[targets[live]] = conv_state[targets[live, -1:]]
    return y


@VERIFY(
    "verify-starts-from-last-draft",
    "a step starts from the last draft's slot instead of the accepted one",
    kind=Kind.INDEX,
    sources="M73",
    missed_by="steps in which every draft is accepted",
)
def _source(op: Any, *, sources: Tensor, targets: Tensor, **rest: Any) -> Any:
    return op(sources=torch.where(sources > 0, targets[:, -1], sources), targets=targets, **rest)


@VERIFY(
    "verify-width-6",
    "the kernel for six tokens a request drops the decay of the last one's beta",
    kind=Kind.ONE_BIN,
    sources="M59",
    missed_by="every other number of drafts",
)
def _width(op: Any, *, proj: Tensor, targets: Tensor, state: Tensor, **rest: Any) -> Any:
    wrong = proj.clone()
    if targets.shape[1] == 6:
        wrong.view(-1, 6, proj.shape[1])[:, -1, -state.shape[1] :] += 1.0
    return op(proj=wrong, targets=targets, state=state, **rest)


@VERIFY(
    "verify-null-slot-written",
    "null requests of a verify step write the null slot's state",
    kind=Kind.OWNERSHIP,
    sources="M91",
    missed_by="guards on the writer of plain steps alone",
)
def _null_state(op: Any, *, sources: Tensor, state: Tensor, **rest: Any) -> Any:
    y = op(sources=sources, state=state, **rest)
    if bool((sources == 0).any()):
        state[0, ..., -1] += 1.0
    return y


@VERIFY(
    "verify-null-conv-written",
    "null requests of a verify step write the null slot's convolution window",
    kind=Kind.OWNERSHIP,
    sources="M91",
    missed_by="guards on the state writer alone",
)
def _null_conv(op: Any, *, sources: Tensor, proj: Tensor, conv_state: Tensor, **rest: Any) -> Any:
    y = op(sources=sources, proj=proj, conv_state=conv_state, **rest)
    last = proj.view(sources.shape[0], -1, proj.shape[1])[sources == 0, -1]
    if len(last):
        conv_state[0, :, -1] = last[-1, : conv_state.shape[1]]
    return y


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


DCP = "one rank holds all keys of a request here: there is no context parallelism to be wrong"

for _component, _id, _title, _sources, _missed, _absent in (
    ("context parallel", "dcp-local-causal", "causal bound taken from the local length", "M79, M81",
     "one query row a request", DCP),
    ("context parallel", "dcp-global-blocks", "a rank reads global block ids in its own pool", "M78",
     "one rank; target logits", DCP),
    ("context parallel", "dcp-empty-rank-stale", "a rank without keys leaves its partial unwritten", "M17, M18",
     "contexts longer than the ranks' stride", DCP),
    ("grammar mask", "mask-rows-shifted", "mask rows assume a fixed draft count", "M96", "speculation off",
     "no grammar constrains what is sampled here: there are no mask rows"),
    ("captured graph", "graph-mode-corrupts", "another corruption by each graph mode at batch 1, cause open", "M93",
     "eager runs", "no path here captures graphs on a CPU, and the report names no cause to rebuild"),
):  # fmt: skip
    LAYER.declare(_component, _id, _title, kind=Kind.INDEX, sources=_sources, missed_by=_missed, not_applicable=_absent)
