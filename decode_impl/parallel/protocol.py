"""Arithmetic of the collectives over symmetric memory: which slot, which flag value, when a wait is over.

Every function takes and returns plain integers and uses `+ - * // % &` alone, so that the rank programs of
`programs.py` (which the sync gate explores and stresses) and the kernels (through twins that a test holds equal) decide
alike. Integers stand for signed words of `bits` bits that wrap, as int32 does on a GPU.

**A tile is a protocol of its own.** A collective is cut into tiles of BLOCK elements, one thread block each. Tile t of
a rank owns, in memory that its peers can write:

    flags    int32 [tiles, ranks]                        written by the peers, one word per source
    mail     bf16  [tiles, SLOTS, STAGES, ranks, BLOCK]  written by the peers
    epochs   int32 [tiles]                               private: collectives that this tile has finished
    failure  int32 [4], abort int32 [1]                  one per rank; `abort` is written by any rank that failed

All start as zeros. No two tiles share a word, so the number of tiles, and with it the batch, may change from call to
call, and the epoch lives in device memory, so that a captured graph can be replayed. Launches of one rank that use a
tile run one after another (one stream, or dependent launches that wait).

**One call on a tile**, e = next_epoch(epochs[t]), s = slot(e):

    one-shot   for every peer: its mail[t, s, CONTRIBUTE, me] = my tile; then, with release at system scope,
               its flags[t, me] = flag_value(e, GATHER).
               For every peer: spin on my flags[t, peer] with acquire until is_ready(flag, flag_value(e, GATHER)),
               then read my mail[t, s, CONTRIBUTE, peer]. Sum in rank order, own tile from registers.
    two-shot   rank r owns piece r of the tile (piece_range). Every rank sends piece r to r: mail[t, s, CONTRIBUTE, me]
               and flag_value(e, CONTRIBUTE). The owner waits for all, sums in rank order, rounds once, sends the sum to
               every peer: mail[t, s, GATHER, me] and flag_value(e, GATHER). Every rank waits for all.
    in place   peers read my input where it lies. flag_value(e, CONTRIBUTE): it may be read; flag_value(e, GATHER): I
               have read all peers'. Nobody returns before GATHER from all: then the input may be overwritten.
    last       epochs[t] = e.

All stores of a thread block come before its flag: a barrier of the block, then the release by one thread; and the
other way round, an acquire by one thread, a barrier, then the loads.

**Why two slots do.** A peer writes slot s again at e + 2. By then it has seen my flag of e + 1, which I release after
my last read of e. A flag may already say e + 1 when I wait for e, never more: hence `is_ready` is "at least", modulo
2^bits, and three bits already suffice. One word serves both stages and both kinds of call, and every call of a tile
writes it; so it is never older than one call, and no counter can be mistaken after a wrap.

**Failure.** Every wait is bounded by time and ends early when `abort` is set. Who gives up writes failure = (code,
tile, epoch, source) once, sets `abort` on every peer, publishes nothing more and returns; later launches return at
once while `failure` is set. The host reads `failure` with the step's results and raises `CollectiveError`.
"""

from __future__ import annotations

BITS = 32
"""Width of flags and epochs."""

SLOTS, STAGES = 2, 2

CONTRIBUTE, GATHER = 0, 1
"""Stages of a call: partial sums to who adds them; sums (of a one-shot call: everything) to who wants them."""

TIMED_OUT, DISAGREED, ABORTED = 1, 2, 3
"""Codes in `failure`; 0 while all is well."""


def wrapped(value: int, bits: int = BITS) -> int:
    """`value` as a signed word: what int32 arithmetic leaves of it."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


def next_epoch(finished: int, bits: int = BITS) -> int:
    """Epoch of a tile's next call, given the epoch of its last one."""
    return wrapped(finished + 1, bits)


def slot(epoch: int) -> int:
    """Which half of a tile's mail a call uses. `&` and not `%`: an epoch that has wrapped is negative."""
    return epoch & 1


def flag_value(epoch: int, stage: int, bits: int = BITS) -> int:
    """What a source writes into its flag when its data of `stage` are in place: it grows from call to call."""
    return wrapped(2 * epoch + stage, bits)


def is_ready(flag: int, wanted: int, bits: int = BITS) -> bool:
    """Whether a flag says `wanted` or later. In int32: `flag - wanted >= 0`, with wrap."""
    return wrapped(flag - wanted, bits) >= 0


def flag_index(tile: int, source: int, ranks: int) -> int:
    """Place of a source's flag among a rank's flags."""
    return tile * ranks + source


def mail_index(tile: int, in_slot: int, stage: int, source: int, ranks: int) -> int:
    """Place of a message in a rank's mail, in units of BLOCK elements."""
    return ((tile * SLOTS + in_slot) * STAGES + stage) * ranks + source


def piece_range(owner: int, ranks: int, block: int) -> tuple[int, int]:
    """Elements `start, stop` of a tile that a rank adds up in a two-shot call; `block` is a multiple of `ranks`."""
    return owner * (block // ranks), (owner + 1) * (block // ranks)


def is_over(now: int, start: int, limit: int) -> bool:
    """Whether a wait has used up its time; all in nanoseconds of one clock."""
    return now - start > limit


# Mail without flags: a word that payload never has says that nothing has arrived yet.

SENTINEL = 0x8000_0000
"""32-bit word of mail that is not there yet: the BF16 pair (+0, -0)."""

NEGATIVE_ZERO = 0x8000
"""BF16 bits that a sender turns into +0, so that no pair of values is the sentinel."""


def sendable(bf16_bits: int) -> int:
    """BF16 bits as they are sent: -0 becomes +0, everything else, NaN and subnormals included, stays.

    It takes what the rounding to BF16 gave: a tiny negative FP32 value becomes -0 only there.
    """
    return bf16_bits * (bf16_bits != NEGATIVE_ZERO)


def has_arrived(word: int) -> bool:
    """Whether a 32-bit word of mail is payload."""
    return word != SENTINEL


def rearmed_slot(epoch: int) -> int:
    """Which slot a reader fills with the sentinel again, right after its last read in `epoch`: the one just read.

    Not the next one, which peers may be writing, and not before the reads. The stores must land before the reader's own
    mail of the next call is sent: the end of the launch sees to that.
    """
    return slot(epoch)


# Mail between a host and its device, and between two streams: one writer, one reader, both a flag.


def ring_slot(step: int, depth: int) -> int:
    """Which buffer of a ring a step uses; steps count from 0 and do not wrap on a host."""
    return step % depth


def has_landed(landed: int, step: int) -> bool:
    """Whether the copy of this step is complete, given the step that the copy's event has reported last."""
    return landed >= step


def may_overwrite(consumed: int, step: int, depth: int) -> bool:
    """Whether a step may write its buffer of the ring: the reader is done with the step that had it before."""
    return consumed >= step - depth
