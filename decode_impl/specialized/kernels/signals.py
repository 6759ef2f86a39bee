"""Flags, waits and sync points of the collectives' kernels, on the arithmetic of `decode_impl.parallel.protocol`.

The functions `next_epoch` to `mail_index` are the protocol's own in int32, held equal by a test. Arguments are those of
`collectives`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_impl.parallel import protocol
from decode_impl.specialized.kernels.common import INTERPRETED

CONTRIBUTE, GATHER = tl.constexpr(protocol.CONTRIBUTE), tl.constexpr(protocol.GATHER)
SLOTS, STAGES = tl.constexpr(protocol.SLOTS), tl.constexpr(protocol.STAGES)
TIMED_OUT, DISAGREED = tl.constexpr(protocol.TIMED_OUT), tl.constexpr(protocol.DISAGREED)
ABORTED = tl.constexpr(protocol.ABORTED)

DATA, FLAG, WAIT, READ, LEAVE = (tl.constexpr(point) for point in range(5))
POINTS = 5
"""Sync points: before payload is stored, before a flag is, before a wait, before a load, before the end."""

FLAG_FIRST, BAKED_EPOCH, SHARED_COUNTER, ODD_LAYERS, NO_WAIT, NO_EXIT, RELAXED = (tl.constexpr(i) for i in range(1, 8))
"""Values of WRONG: negative controls."""

_LOOKS = tl.constexpr(64)
"""Looks at a flag between two looks at the clock and at `abort`."""


@triton.jit
def next_epoch(finished):
    """protocol.next_epoch"""
    return finished + 1


@triton.jit
def slot(epoch):
    """protocol.slot"""
    return epoch & 1


@triton.jit
def flag_value(epoch, stage):
    """protocol.flag_value"""
    return 2 * epoch + stage


@triton.jit
def is_ready(flag, wanted):
    """protocol.is_ready"""
    return flag - wanted >= 0


@triton.jit
def flag_index(tile, source, ranks):
    """protocol.flag_index"""
    return tile * ranks + source


@triton.jit
def mail_index(tile, in_slot, stage, source, ranks):
    """protocol.mail_index"""
    return ((tile * SLOTS + in_slot) * STAGES + stage) * ranks + source


@triton.jit
def _clock_us():
    """The device's clock in microseconds. Threads read it at different times, so no branch may depend on it alone.

    The interpreter has none: there, time stands still.
    """
    if INTERPRETED:
        return tl.full([], 0, tl.int64)
    ns = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return ns // 1000


@triton.jit
def has_failed(failure):
    """Whether this rank has given up. Atomic, so that one thread reads it for the whole thread block."""
    return tl.atomic_add(failure, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def stall(stalls, point: tl.constexpr, STALLED: tl.constexpr):
    """Sleep at a sync point for as long as the plan says."""
    if STALLED:
        for _ in range(tl.load(stalls + point)):
            tl.inline_asm_elementwise(
                "nanosleep.u32 1000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()


@triton.jit
def words_at_byte(peers, rank, at):
    """The int32 words at byte `at` of a rank's workspace."""
    return (tl.load(peers + rank) + at).to(tl.pointer_type(tl.int32))


@triton.jit
def mail_of(peers, rank):
    """The BF16 mail of a rank."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.bfloat16)), [16])


@triton.jit
def tell_all(peers, flags_at, tile, value, RANK: tl.constexpr, RANKS: tl.constexpr, WRONG: tl.constexpr):
    """Write this rank's flag on every peer. The barrier puts all stores of the thread block before the release."""
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        flags = words_at_byte(peers, (RANK + step) % RANKS, flags_at)
        if WRONG == RELAXED:
            tl.atomic_xchg(flags + flag_index(tile, RANK, RANKS), value, sem="relaxed", scope="gpu")
        else:
            tl.atomic_xchg(flags + flag_index(tile, RANK, RANKS), value, sem="release", scope="sys")


@triton.jit
def give_up(peers, failure, abort_at, code, tile, epoch, source, RANKS: tl.constexpr):
    """Say once why, and tell every rank to give up too."""
    if tl.atomic_cas(failure, 0, code) == 0:
        tl.store(failure + 1, tile)
        tl.store(failure + 2, epoch)
        tl.store(failure + 3, source)
    for rank in tl.static_range(RANKS):
        tl.atomic_xchg(words_at_byte(peers, rank, abort_at), 1, sem="release", scope="sys")


@triton.jit
def await_all(
    peers, failure, late, flags_at, abort_at, tile, epoch, wanted, limit_us, RANK: tl.constexpr,
    RANKS: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    """Wait for every peer's flag. Returns whether all came; if not, the failure has been told."""
    mine = words_at_byte(peers, RANK, flags_at)
    abort = words_at_byte(peers, RANK, abort_at)
    start = _clock_us()
    complete = True
    for step in tl.static_range(1, RANKS):
        source = (RANK + step) % RANKS
        place = mine + flag_index(tile, source, RANKS)
        looks = 0
        code = 0
        arrived = is_ready(tl.atomic_add(place, 0, sem="acquire", scope="sys"), wanted)
        if WRONG == NO_WAIT:
            arrived = True
        while complete and not arrived:
            arrived = is_ready(tl.atomic_add(place, 0, sem="acquire", scope="sys"), wanted)
            looks += 1
            if looks % _LOOKS == 0 and not arrived:
                if tl.atomic_add(abort, 0, sem="relaxed", scope="sys") != 0:
                    code = ABORTED
                # One thread's clock decides for all: what it has written is read back at the next look.
                if tl.atomic_or(late + tile, (_clock_us() - start > limit_us).to(tl.int32), sem="relaxed") != 0:
                    code = TIMED_OUT
                if code != 0:
                    give_up(peers, failure, abort_at, code, tile, epoch, source, RANKS)
                    complete = False
    # The acquire was one thread's; the barrier puts the loads of all the others behind it.
    tl.debug_barrier()
    return complete


@triton.jit
def epoch_of(epochs, tile, WRONG: tl.constexpr):
    epoch = next_epoch(tl.load(epochs + tile))
    if WRONG == BAKED_EPOCH:
        epoch = epoch * 0 + 1
    return epoch


@triton.jit
def slot_of(epoch, WRONG: tl.constexpr):
    if WRONG == ODD_LAYERS:
        epoch = epoch % 3
    return slot(epoch)
