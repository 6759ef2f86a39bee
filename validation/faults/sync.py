"""Faults of synchronisation between ranks, launches, streams, warps and a host: parts of the collectives' programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("synchronisation", gate="sync", kind=Kind.RACE)

Wrong = Callable[..., Any]


def protocol(part: str, id: str, title: str, **fields: Any) -> Callable[[Wrong], Wrong]:
    """The decorated function is the wrong part of the collectives; it gets the right one, then the arguments."""

    def keep(wrong: Wrong) -> Wrong:
        def replaced(collectives: Any) -> Any:
            def table() -> dict[str, Any]:
                parts = collectives()
                right = parts[part]
                return {**parts, part: lambda *args, **options: wrong(right, *args, **options)}

            return table

        LAYER.engine("collectives", id, title, gate="sync", **fields)(replaced)
        return wrong

    return keep


def nothing(*args: Any) -> Iterator[Any]:
    """A barrier that was forgotten."""
    yield from ()


@protocol(
    "two_shot",
    "sync-shared-epoch",
    "one-shot and two-shot share an epoch counter that one path does not flip",
    sources="M97",
    missed_by="one batch size",
)
def _shared_epoch(right: Wrong, p: Any, call: Any) -> Any:
    yield from right(p, call)
    return call.finished


@protocol(
    "one_shot",
    "sync-constant-epoch",
    "the epoch is a constant of the captured graph",
    sources="M98",
    kind=Kind.STALE,
    missed_by="replays with constant inputs",
)
def _constant_epoch(right: Wrong, p: Any, call: Any) -> Any:
    baked = lambda finished, **bits: 1  # noqa: E731
    equal = lambda flag, wanted, **bits: flag == wanted  # noqa: E731
    return (yield from right({**p, "next_epoch": baked, "is_ready": equal}, call))


@protocol(
    "is_ready",
    "sync-equality-wait",
    "a wait is for exactly one flag value, which a faster peer has overwritten",
    sources="kind of M98",
    missed_by="ranks in step",
)
def _equality(right: Wrong, flag: int, wanted: int, **bits: int) -> bool:
    return flag == wanted


protocol(
    "exit_barrier",
    "sync-no-exit-barrier",
    "a rank reuses its input while peers still read it",
    sources="M99",
    missed_by="10,000 quiet iterations",
)(nothing)


@protocol(
    "in_place",
    "sync-no-entry-barrier",
    "peers' inputs are read before they are there",
    sources="kind of M99",
    missed_by="a launch that begins late",
)
def _no_entry(right: Wrong, p: Any, call: Any) -> Any:
    return (yield from right({**p, "barrier": nothing}, call))


@protocol(
    "send",
    "sync-flag-before-data",
    "the flag is stored before the data",
    sources="M100",
    missed_by="one collective and a sync",
)
def _flag_first(right: Wrong, *args: Any) -> Iterator[Any]:
    stores = list(right(*args))
    yield from sorted(stores, key=lambda store: not store.release)


@protocol(
    "send",
    "sync-flag-after-first-piece",
    "the flag is stored when the first piece of a message is there",
    sources="M100",
    missed_by="messages of one piece",
)
def _partial_word(right: Wrong, *args: Any) -> Iterator[Any]:
    stores = list(right(*args))
    data = [store for store in stores if not store.release]
    first = [store for store in data if store.place.index[-1] == 0]
    yield from first
    yield from (store for store in stores if store.release)
    yield from (store for store in data if store not in first)


@protocol(
    "send",
    "sync-relaxed-flag",
    "the flag is stored without release, so it may land before the data",
    sources="M97, M100",
    missed_by="hosts that keep the order of stores",
)
def _relaxed_flag(right: Wrong, *args: Any) -> Iterator[Any]:
    for store in right(*args):
        yield type(store)(store.place, store.value)


@protocol(
    "await_flag",
    "sync-relaxed-wait",
    "the wait does not acquire, so data may be read before it",
    sources="M97",
    missed_by="hosts that keep the order of loads",
)
def _relaxed_wait(right: Wrong, *args: Any) -> Iterator[Any]:
    for wait in right(*args):
        yield type(wait)(wait.place, wait.ready, wait.source, wait.epoch, wait.slot, acquire=False)


@protocol(
    "await_flag",
    "sync-unbounded-wait",
    "a wait has no time limit",
    sources="M97, M103",
    missed_by="ranks that all live",
)
def _unbounded(right: Wrong, *args: Any) -> Iterator[Any]:
    for wait in right(*args):
        yield type(wait)(wait.place, wait.ready, wait.source, wait.epoch, wait.slot, bounded=False)


@protocol(
    "mail_without_flags",
    "sync-rearm-current",
    "the current buffer is cleared instead of the next",
    sources="M102",
    missed_by="ranks in step",
)
def _rearm_current(right: Wrong, p: Any, call: Any) -> Any:
    yield from p["rearm"](p, call, p["next_epoch"](call.finished))
    return (yield from right({**p, "rearm": nothing}, call))


@protocol(
    "rearmed_slot",
    "sync-rearm-next",
    "the buffer that peers write next is cleared",
    sources="M102",
    missed_by="constant row counts",
)
def _rearm_next(right: Wrong, epoch: int) -> int:
    return 1 - int(right(epoch))


@protocol(
    "agree",
    "sync-one-rank-two-shot",
    "one rank chooses the two-shot order, the others one-shot",
    sources="M103",
    missed_by="symmetric runs",
)
def _no_agreement(right: Wrong, p: Any, call: Any) -> Any:
    yield from ()
    return call.finished


@protocol(
    "slot",
    "sync-parity-of-layer",
    "the slot is the parity of the layer, and a step has an odd number of layers",
    sources="M97",
    missed_by="an even number of layers",
)
def _parity(right: Wrong, epoch: int) -> int:
    return int(right(epoch % 3))


@protocol(
    "slot",
    "sync-one-slot",
    "mail has one slot instead of two",
    sources="kind of M102",
    missed_by="ranks in step",
)
def _one_slot(right: Wrong, epoch: int) -> int:
    return 0


@protocol(
    "mail_words",
    "sync-sentinel-after-cast",
    "a payload that rounds to -0 is the sentinel of data not yet there",
    sources="F: -0.0 sentinel",
    missed_by="payloads without subnormals",
)
def _sentinel(right: Wrong, p: Any, values: Any) -> Any:
    # +0 takes the sign off -0 and leaves every other value alone.
    return right({**p, "sendable": lambda bits: bits}, values + 0.0)


@protocol(
    "sendable",
    "sync-sentinel-kept",
    "-0 is sent as it is",
    sources="F: -0.0 sentinel",
    missed_by="payloads without -0",
)
def _kept(right: Wrong, bits: Any) -> Any:
    return bits


protocol(
    "dependency_wait",
    "sync-dependency-wait",
    "a dependent launch does not wait for its producer",
    sources="M105",
    missed_by="normal timing",
)(nothing)

protocol(
    "join",
    "sync-stream-alias",
    "shared expert's stream and the routed path alias one tensor",
    sources="M106",
    missed_by="quantised variants, which copy",
)(nothing)


@protocol(
    "has_landed",
    "sync-counts-before-copy",
    "host reads accepted counts before their copy lands",
    sources="M107",
    kind=Kind.STALE,
    missed_by="synchronous scheduling",
)
def _too_early(right: Wrong, landed: int, step: int) -> bool:
    return bool(right(landed, step - 1))


@protocol(
    "may_overwrite",
    "sync-pinned-reuse",
    "a pinned buffer is rewritten before its copy runs",
    sources="M108",
    missed_by="an idle GPU",
)
def _always(right: Wrong, consumed: int, step: int, depth: int) -> bool:
    return True


protocol(
    "broadcast_done",
    "sync-shared-memory-reuse",
    "shared memory reused without a barrier after a broadcast",
    sources="M109",
    missed_by="output comparisons (2e-6 of calls)",
)(nothing)


@protocol(
    "broadcast_done",
    "sync-leader-rewrites",
    "the leader rewrites a shared scalar before all have read it",
    sources="M110",
    missed_by="single runs",
)
def _leader(right: Wrong, p: Any, call: Any, epoch: int, stage: int) -> Any:
    if call.rank:
        yield from right(p, call, epoch, stage)
    else:
        told = p["flag_value"](epoch, stage)
        yield from p["send"](p, call, epoch, stage, {peer: {} for peer in call.peers}, told)


@protocol(
    "publish_layer",
    "sync-layer-counter",
    "the last layer's counter is not published on one path",
    sources="M111",
    missed_by="many layers a launch",
)
def _unpublished(right: Wrong, call: Any, epoch: int, layer: int) -> Iterator[Any]:
    return nothing() if layer == len(call.pieces) - 1 else right(call, epoch, layer)


@protocol(
    "partial_sums",
    "sync-atomic-order",
    "experts' partial sums are added in the order in which they finish",
    sources="M111",
    kind=Kind.REDUCTION,
    missed_by="tolerances",
)
def _atomic(right: Wrong, p: Any, call: Any) -> Any:
    return (yield from right({**p, "leave_partial": p["add_partial"], "sum_partials": p["read_sum"]}, call))


@protocol(
    "as_partial",
    "sync-one-chunk-pun",
    "with one KV chunk an FP32 partial is read as BF16",
    sources="M111",
    kind=Kind.LAYOUT,
    missed_by="several chunks",
)
def _pun(right: Wrong, row: Any, splits: int) -> Any:
    return ("BF16", row) if splits == 1 else right(row, splits=splits)


protocol(
    "plan_ready",
    "sync-planner-race",
    "the planner's threads read ids before they are written",
    sources="M113",
    missed_by="uniform lengths",
)(nothing)

protocol(
    "cluster_exit",
    "sync-cluster-exit",
    "a thread block leaves its cluster early",
    sources="M114",
    missed_by="outputs",
)(nothing)
