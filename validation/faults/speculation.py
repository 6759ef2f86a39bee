"""Faults of speculative decoding: verify steps, rollback, the drafter, acceptance."""

from __future__ import annotations

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


for _component, _id, _title, _kind, _sources, _missed in (
    ("accept", "spec-column-zero", "a step without drafts reads column 0 after n were accepted", Kind.INDEX, "M73",
     "constant draft counts; acceptance stays at 64 to 81 %"),
    ("accept", "spec-one-token-too-many", "rollback keeps one token too many", Kind.INDEX, "M74",
     "outputs right after the step"),
    ("accept", "spec-one-token-too-few", "rollback keeps one token too few", Kind.INDEX, "M74",
     "outputs right after the step"),
    ("accept", "spec-none-accepted-is-minus-one", "no accepted draft indexes column -1", Kind.INDEX, "M76",
     "high acceptance; batch size 1"),
    ("accept", "spec-counts-of-last-step", "accepted counts of the step before are used", Kind.STALE, "M107",
     "synchronous scheduling"),
    ("accept", "spec-drop-block-on-hit", "a drafter's rule drops the last block of a recurrent prefix", Kind.SCHEDULE,
     "M68", "speculation off"),
    ("drafter", "draft-context-missing-on-hit", "cached tokens never reach the drafter's cache", Kind.STALE, "M77",
     "target outputs, which stay exact; cold benchmarks"),
    ("drafter", "draft-rows-shifted", "draft rows shifted by one: one draft fewer a pass", Kind.INDEX, "M82",
     "target text"),
    ("drafter", "draft-rope-scaling-dropped", "rope scaling of the drafter ignored", Kind.CONSTANT, "M82",
     "short contexts; target text"),
    ("drafter", "draft-taps-prefix", "drafter taps the running prefix instead of the mixture", Kind.OPERAND, "M55",
     "target logits"),
    ("drafter", "draft-target-heads", "drafter's schedule made with the target's head count", Kind.OPERAND, "M30",
     "target-only tests"),
    ("drafter", "draft-rows-permuted", "persistent draft rows do not follow a reordered batch", Kind.INDEX, "M129",
     "a fixed order of requests"),
    ("drafter", "draft-id-out-of-range", "arg-max over a NaN row returns an id that does not exist", Kind.MASK,
     "M30, M130", "ordinary probabilities"),
    ("context parallel", "dcp-local-causal", "causal bound taken from the local length", Kind.INDEX, "M79, M81",
     "one query row a request"),
    ("context parallel", "dcp-global-blocks", "drafter reads global block ids in a rank's own pool", Kind.INDEX, "M78",
     "one rank; target logits"),
    ("context parallel", "dcp-empty-rank-stale", "a rank without keys leaves its partial unwritten", Kind.STALE,
     "M17, M18", "contexts longer than the ranks' stride"),
    ("grammar mask", "mask-rows-shifted", "mask rows assume a fixed draft count", Kind.INDEX, "M96",
     "speculation off"),
):  # fmt: skip
    LAYER.declare(_component, _id, _title, kind=_kind, sources=_sources, missed_by=_missed)
