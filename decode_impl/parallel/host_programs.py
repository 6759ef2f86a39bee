"""Mail between a host and its device, and between two streams, as programs of two agents."""

from __future__ import annotations

from collections.abc import Iterator

from decode_impl.parallel.operations import Load, Message, Operation, Place, Program, Return, Store, Wait
from decode_impl.parallel.programs import Call, Parts

DEPTH = 2
"""Steps in flight."""

_WRITER, _READER = 0, 1


def counts_to_host(p: Parts, call: Call) -> Program:
    """The device (agent 0) copies accepted counts to the host (agent 1), which reads them when the copy has landed."""
    yield from _ring(p, call, "counts")
    return call.finished + 1


def staging(p: Parts, call: Call) -> Program:
    """The host (agent 0) writes a pinned buffer and queues its copy; the device (agent 1) copies when it gets there."""
    yield from _ring(p, call, "pinned")
    return call.finished + 1


def _ring(p: Parts, call: Call, area: str) -> Program:
    """One writer, one reader, DEPTH buffers. Events count the steps written and read."""
    step = call.finished + 1
    buffer = Place(_WRITER, area, (p["ring_slot"](step, DEPTH),))
    written, read = Place(_READER, "event", (0,)), Place(_WRITER, "event", (1,))
    if call.rank == _WRITER:
        yield from _wait(read, lambda consumed: p["may_overwrite"](consumed, step, DEPTH), _READER, step)
        yield Store(buffer, call.pieces[0])
        yield Store(written, step, release=True)
    else:
        yield from _wait(written, lambda landed: p["has_landed"](landed, step), _WRITER, step)
        yield Load(buffer, Message(0, _WRITER, 0))
        yield Store(read, step, release=True)
    yield Return(())


def two_streams(p: Parts, call: Call) -> Program:
    """Routed path (agent 0) and shared expert (agent 1) read one activation; agent 0 writes the next into it."""
    step, x = call.finished + 1, Place(0, "activation")
    fork, join = Place(1, "event", (0,)), Place(0, "event", (1,))
    if call.rank == 0:
        yield Store(x, call.pieces[0])
        yield Store(fork, step, release=True)
        yield from p["join"](join, step)
    else:
        yield from _wait(fork, lambda forked: forked >= step, 0, step)
        yield Load(x, Message(0, 0, 0))
        yield Store(join, step, release=True)
    yield Return(())
    return step


def join(event: Place, step: int) -> Iterator[Operation]:
    """Wait for the other stream before its input is written again."""
    yield from _wait(event, lambda joined: joined >= step, 1, step)


def _wait(place: Place, ready: object, source: int, step: int) -> Iterator[Operation]:
    yield Wait(place, ready, source, step, step % DEPTH)  # type: ignore[arg-type]
