"""Faults of synchronisation between ranks, streams and replays. Declared: the collectives are not here yet."""

from __future__ import annotations

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("synchronisation", gate="sync", kind=Kind.RACE)

_GPU = "needs a GPU: streams, dependent launches or warps that a CPU does not have"

for _id, _title, _sources, _missed, _why in (
    ("sync-shared-epoch", "one-shot and two-shot share an epoch counter that one path does not flip", "M97",
     "one batch size", ""),
    ("sync-constant-epoch", "the epoch is a constant of the captured graph", "M98", "replays with constant inputs", ""),
    ("sync-no-exit-barrier", "a rank reuses its input while peers still read it", "M99",
     "10,000 quiet iterations", ""),
    ("sync-flag-before-data", "the flag is stored before the data", "M100", "one collective and a sync", ""),
    ("sync-rearm-current", "the current buffer is cleared instead of the next", "M102", "constant row counts", ""),
    ("sync-one-rank-two-shot", "one rank chooses the two-shot order, the others one-shot", "M103",
     "symmetric runs", ""),
    ("sync-sentinel-after-cast", "a payload that rounds to -0 is the sentinel of data not yet there",
     "F: -0.0 sentinel", "payloads without subnormals", ""),
    ("sync-dependency-wait", "a dependent launch does not wait for its producer", "M105", "normal timing", _GPU),
    ("sync-stream-alias", "shared expert's stream and the routed path alias one tensor", "M106",
     "quantised variants, which copy", _GPU),
    ("sync-counts-before-copy", "host reads accepted counts before their copy lands", "M107",
     "synchronous scheduling", ""),
    ("sync-pinned-reuse", "a pinned buffer is rewritten before its copy runs", "M108", "an idle GPU", _GPU),
    ("sync-shared-memory-reuse", "shared memory reused without a barrier after a broadcast", "M109",
     "output comparisons (2e-6 of calls)", ""),
    ("sync-leader-rewrites", "the leader rewrites a shared scalar before all have read it", "M110", "single runs", ""),
    ("sync-layer-counter", "the last layer's counter is not published on one path", "M111", "many layers a launch", ""),
    ("sync-atomic-order", "experts' partial sums are added in the order in which they finish", "M111",
     "tolerances", ""),
    ("sync-one-chunk-pun", "with one KV chunk an FP32 partial is read as BF16", "M111", "several chunks", ""),
    ("sync-planner-race", "the planner's threads read ids before they are written", "M113", "uniform lengths", ""),
    ("sync-cluster-exit", "a thread block leaves its cluster early", "M114", "outputs", _GPU),
):  # fmt: skip
    LAYER.declare("collective", _id, _title, sources=_sources, missed_by=_missed, not_applicable=_why)
