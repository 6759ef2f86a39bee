"""What a launch relies on inside one device, as programs: agents are warps, thread blocks of a cluster, or launches.

The kernels leave these to the hardware's barriers and to stream order; the programs say which of them are needed. A
barrier of a block or a cluster is the same exchange of flags as a barrier of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import le

from decode_impl.parallel.operations import (
    Add,
    Drain,
    Load,
    Message,
    Operation,
    Place,
    Program,
    Return,
    Store,
    Value,
    Wait,
)
from decode_impl.parallel.programs import Call, Parts
from decode_impl.parallel.protocol import CONTRIBUTE, GATHER

LAYERS = 3
"""Layers of one launch in `layer_chain`."""

_LEADER = 0


def broadcast(p: Parts, call: Call) -> Program:
    """The leader tells its warps one number through shared memory, in the same word at every call."""
    epoch, word = p["next_epoch"](call.finished), Place(_LEADER, "shared")
    if call.rank == _LEADER:
        yield Store(word, call.pieces[0])
    yield from p["broadcast_ready"](p, call, epoch, CONTRIBUTE)
    yield Load(word, Message(CONTRIBUTE, _LEADER, 0))
    yield from p["broadcast_done"](p, call, epoch, GATHER)
    yield Return(())
    return epoch


def planner(p: Parts, call: Call) -> Program:
    """Every thread writes its entry of a table, then all read the whole table."""
    epoch = p["next_epoch"](call.finished)
    yield Store(Place(_LEADER, "plan", (call.rank,)), call.pieces[0])
    yield from p["plan_ready"](p, call, epoch, CONTRIBUTE)
    for source in range(call.ranks):
        yield Load(Place(_LEADER, "plan", (source,)), Message(CONTRIBUTE, source, 0))
    yield from p["plan_done"](p, call, epoch, GATHER)
    yield Return(())
    return epoch


def layer_chain(p: Parts, call: Call) -> Program:
    """One launch runs several layers; a counter tells the consumers which of them are done."""
    epoch = p["next_epoch"](call.finished)
    for layer in range(LAYERS):
        row = Place(_LEADER, "row", (layer,))
        if call.rank == _LEADER:
            yield Store(row, call.pieces[layer])
            yield from p["publish_layer"](call, epoch, layer)
        else:
            finished = partial(le, LAYERS * call.finished + layer + 1)
            yield Wait(Place(_LEADER, "layers"), finished, _LEADER, epoch, layer)
            yield Load(row, Message(CONTRIBUTE, _LEADER, layer))
    yield from p["barrier"](p, call, epoch, GATHER)
    yield Return(())
    return epoch


def publish_layer(call: Call, epoch: int, layer: int) -> Iterator[Operation]:
    """Count a finished layer, the last one of a launch included."""
    yield Store(Place(_LEADER, "layers"), LAYERS * call.finished + layer + 1, release=True)


def partial_sums(p: Parts, call: Call) -> Program:
    """Thread blocks leave partial sums, each in a place of its own; all add them up in one order."""
    epoch = p["next_epoch"](call.finished)
    yield from p["leave_partial"](call)
    yield from p["barrier"](p, call, epoch, CONTRIBUTE)
    total = yield from p["sum_partials"](call)
    yield from p["barrier"](p, call, epoch, GATHER)
    yield Return((total,))
    return epoch


def leave_partial(call: Call) -> Program:
    """Store this block's partial sum in its own place."""
    yield Store(Place(_LEADER, "partial", (call.rank,)), call.pieces[0])


def sum_partials(call: Call) -> Program:
    """Add the partial sums in the order of the blocks."""
    found = []
    for source in range(call.ranks):
        value = yield Load(Place(_LEADER, "partial", (source,)), Message(CONTRIBUTE, source, 0))
        found.append(value)
    return call.add(found)


def add_partial(call: Call) -> Program:
    """Add to a shared sum whenever done. For counts alone: the order of the terms is left open."""
    yield Add(Place(_LEADER, "total", (call.finished & 1,)), call.pieces[0])


def read_sum(call: Call) -> Program:
    """What `add_partial` has added up."""
    total = yield Load(Place(_LEADER, "total", (call.finished & 1,)), Message(GATHER, _LEADER, 0))
    return total


def split_partial(p: Parts, call: Call) -> Program:
    """A KV split hands its FP32 partial row to who merges; with one split just the same."""
    epoch, row = p["next_epoch"](call.finished), Place(_LEADER, "split")
    if call.rank == _LEADER:
        yield Store(row, p["as_partial"](call.pieces[0], splits=1))
    yield from p["barrier"](p, call, epoch, CONTRIBUTE)
    yield Load(row, Message(CONTRIBUTE, _LEADER, 0))
    yield from p["barrier"](p, call, epoch, GATHER)
    yield Return(())
    return epoch


def as_partial(row: Value, splits: int) -> Value:
    """The row in the format in which the merge reads it: FP32, whatever the number of splits."""
    return row


def dependent_launch(p: Parts, call: Call) -> Program:
    """Agent 0 lets the next launch, agent 1, begin early; that one waits before it reads what agent 0 writes."""
    epoch = p["next_epoch"](call.finished)
    row, began, ended = Place(0, "row", (0,)), call.flag(1, 0), Place(1, "event", (0,))
    if call.rank == 0:
        yield Store(began, p["flag_value"](epoch, CONTRIBUTE), release=True)
        yield Store(row, call.pieces[0])
        yield Drain()
        yield Store(ended, call.finished + 1, release=True)
        yield from p["await_flag"](p, call, epoch, 1, p["flag_value"](epoch, GATHER))
    else:
        yield from p["await_flag"](p, call, epoch, 0, p["flag_value"](epoch, CONTRIBUTE))
        yield from p["dependency_wait"](ended, call.finished + 1, epoch)
        yield Load(row, Message(CONTRIBUTE, 0, 0))
        yield Store(call.flag(0, 1), p["flag_value"](epoch, GATHER), release=True)
    yield Return(())
    return epoch


def dependency_wait(ended: Place, launch: int, epoch: int) -> Iterator[Operation]:
    """Wait until the launch before has ended and all its stores have landed."""
    yield Wait(ended, lambda done: done >= launch, 0, epoch, 0)


def cluster_read(p: Parts, call: Call) -> Program:
    """Blocks of a cluster read one another's shared memory, which is gone when its block exits."""
    epoch = yield from p["in_place"]({**p, "exit_barrier": p["cluster_exit"]}, call)
    return epoch
