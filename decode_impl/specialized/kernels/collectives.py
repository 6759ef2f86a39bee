"""All-reduce over symmetric memory: the programs of `decode_impl.parallel` as kernels, on the same arithmetic.

The contract is the docstring of `decode_impl.parallel.protocol`: a thread block per tile, flags written with release
and read with acquire at system scope, payload by peer pointers, every wait bounded, no multicast.

Arguments that all kernels share: `peers` int64 [RANKS], the address of every rank's workspace; `epochs` int32 [tiles],
`late` int32 [tiles] (set where a wait has used up its time) and `failure` int32 [4], this rank's own; `flags_at`,
`words_at`, `abort_at`, where these areas begin in a workspace, in bytes (mail begins at 0); `limit_us`, of every wait;
`stalls` int32 [POINTS], microseconds of delay at each sync point.
STALLED and WRONG are for tests: both are compiled out where they are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_impl.specialized.kernels.common import bf16, f32
from decode_impl.specialized.kernels.signals import (
    CONTRIBUTE,
    DATA,
    DISAGREED,
    FLAG,
    FLAG_FIRST,
    GATHER,
    LEAVE,
    NO_EXIT,
    READ,
    SHARED_COUNTER,
    WAIT,
    await_all,
    epoch_of,
    flag_value,
    give_up,
    has_failed,
    mail_index,
    mail_of,
    next_epoch,
    slot,
    slot_of,
    stall,
    tell_all,
    words_at_byte,
)


@triton.jit
def one_shot_kernel(
    x_ptr, y_ptr, peers, epochs, late, failure, stalls, n, flags_at, abort_at, limit_us, RANK: tl.constexpr,
    RANKS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STALLED: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,). bf16 x [n] to y [n]: FP32 sum of groups of GROUP ranks in order, then of the groups in order."""
    tile, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = tile * BLOCK + i < n
    if not has_failed(failure):
        epoch = epoch_of(epochs, tile, WRONG)
        s, told = slot_of(epoch, WRONG), flag_value(epoch, GATHER)
        own = tl.load(x_ptr + tile * BLOCK + i, mask=inside, other=0.0)
        if WRONG == FLAG_FIRST:
            tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
        stall(stalls, DATA, STALLED)
        for step in tl.static_range(1, RANKS):
            at = mail_index(tile, s, CONTRIBUTE, RANK, RANKS).to(tl.int64) * BLOCK
            tl.store(mail_of(peers, (RANK + step) % RANKS) + at + i, own)
        stall(stalls, FLAG, STALLED)
        if WRONG != FLAG_FIRST:
            tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
        stall(stalls, WAIT, STALLED)
        if await_all(peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, WRONG):
            stall(stalls, READ, STALLED)
            mail = mail_of(peers, RANK)
            total = tl.zeros([BLOCK], tl.float32)
            for first in tl.static_range(0, RANKS, GROUP):
                group = tl.zeros([BLOCK], tl.float32)
                for rank in tl.static_range(first, first + GROUP):
                    if rank < RANKS:
                        at = mail_index(tile, s, CONTRIBUTE, rank, RANKS).to(tl.int64) * BLOCK
                        part = f32(own) if rank == RANK else f32(tl.load(mail + at + i))
                        group = part if rank == first else group + part
                total = group if first == 0 else total + group
            tl.store(y_ptr + tile * BLOCK + i, bf16(total), mask=inside)
            stall(stalls, LEAVE, STALLED)
            tl.store(epochs + tile, epoch)


@triton.jit
def two_shot_kernel(
    x_ptr, y_ptr, peers, epochs, late, failure, stalls, n, flags_at, abort_at, limit_us, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, STALLED: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,). bf16 x [n] to y [n]: FP32 sums in rank order, each by the rank that owns the piece; RANKS divides
    BLOCK."""
    PIECE: tl.constexpr = BLOCK // RANKS
    tile, i = tl.program_id(0), tl.arange(0, PIECE)
    if not has_failed(failure):
        epoch = epoch_of(epochs, tile, WRONG)
        s, told = slot_of(epoch, WRONG), flag_value(epoch, CONTRIBUTE)
        first = tile * BLOCK
        stall(stalls, DATA, STALLED)
        for step in tl.static_range(1, RANKS):
            owner = (RANK + step) % RANKS
            sent = tl.load(x_ptr + first + owner * PIECE + i, mask=first + owner * PIECE + i < n, other=0.0)
            at = mail_index(tile, s, CONTRIBUTE, RANK, RANKS).to(tl.int64) * BLOCK
            tl.store(mail_of(peers, owner) + at + i, sent)
        tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
        stall(stalls, WAIT, STALLED)
        if await_all(peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, WRONG):
            mail = mail_of(peers, RANK)
            mine = first + RANK * PIECE + i
            own = f32(tl.load(x_ptr + mine, mask=mine < n, other=0.0))
            total = tl.zeros([PIECE], tl.float32)
            for rank in tl.static_range(RANKS):
                at = mail_index(tile, s, CONTRIBUTE, rank, RANKS).to(tl.int64) * BLOCK
                part = own if rank == RANK else f32(tl.load(mail + at + i))
                total = part if rank == 0 else total + part
            rounded = bf16(total)
            told = flag_value(epoch, GATHER)
            for step in tl.static_range(1, RANKS):
                at = mail_index(tile, s, GATHER, RANK, RANKS).to(tl.int64) * BLOCK
                tl.store(mail_of(peers, (RANK + step) % RANKS) + at + i, rounded)
            stall(stalls, FLAG, STALLED)
            tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
            tl.store(y_ptr + mine, rounded, mask=mine < n)
            if await_all(peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, WRONG):
                stall(stalls, READ, STALLED)
                for step in tl.static_range(1, RANKS):
                    owner = (RANK + step) % RANKS
                    at = mail_index(tile, s, GATHER, owner, RANKS).to(tl.int64) * BLOCK
                    theirs = first + owner * PIECE + i
                    tl.store(y_ptr + theirs, tl.load(mail + at + i), mask=theirs < n)
                stall(stalls, LEAVE, STALLED)
                if WRONG != SHARED_COUNTER:
                    tl.store(epochs + tile, epoch)


@triton.jit
def in_place_kernel(
    y_ptr, inputs_at, peers, epochs, late, failure, stalls, n, flags_at, abort_at, limit_us, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, STALLED: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,). Sums bf16 inputs [n], which lie at byte `inputs_at` of every workspace, in rank order to y [n]."""
    tile, i = tl.program_id(0), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if not has_failed(failure):
        epoch = epoch_of(epochs, tile, WRONG)
        told = flag_value(epoch, CONTRIBUTE)
        stall(stalls, FLAG, STALLED)
        tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
        stall(stalls, WAIT, STALLED)
        if await_all(peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, WRONG):
            stall(stalls, READ, STALLED)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(RANKS):
                source = tl.multiple_of((tl.load(peers + rank) + inputs_at).to(tl.pointer_type(tl.bfloat16)), [16])
                part = f32(tl.load(source + i, mask=i < n, other=0.0))
                total = part if rank == 0 else total + part
            tl.store(y_ptr + i, bf16(total), mask=i < n)
            told = flag_value(epoch, GATHER)
            tell_all(peers, flags_at, tile, told, RANK, RANKS, WRONG)
            left = True
            if WRONG != NO_EXIT:
                left = await_all(
                    peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, WRONG
                )
            if left:
                stall(stalls, LEAVE, STALLED)
                tl.store(epochs + tile, epoch)


@triton.jit
def agree_kernel(
    word_ptr, peers, epochs, late, failure, tile, words_at, flags_at, abort_at, limit_us, RANK: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Grid (1,). Compares the int32 at `word_ptr`, what this rank decided, with every peer's; other words end the step.

    `tile` is the tile of the agreement, which no sum uses; its words lie at `words_at`, int32 [SLOTS, RANKS].
    """
    if not has_failed(failure):
        epoch = next_epoch(tl.load(epochs + tile))
        told, mine = flag_value(epoch, GATHER), tl.load(word_ptr)
        for step in tl.static_range(1, RANKS):
            tl.store(words_at_byte(peers, (RANK + step) % RANKS, words_at) + slot(epoch) * RANKS + RANK, mine)
        tell_all(peers, flags_at, tile, told, RANK, RANKS, 0)
        if await_all(peers, failure, late, flags_at, abort_at, tile, epoch, told, limit_us, RANK, RANKS, 0):
            agreed = True
            for step in tl.static_range(1, RANKS):
                source = (RANK + step) % RANKS
                theirs = tl.load(words_at_byte(peers, RANK, words_at) + slot(epoch) * RANKS + source)
                if agreed and theirs != mine:
                    give_up(peers, failure, abort_at, DISAGREED, tile, epoch, source, RANKS)
                    agreed = False
            if agreed:
                tl.store(epochs + tile, epoch)
