"""The collectives as rank programs: the order of stores, flags, waits and loads around the arithmetic of `protocol`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode_impl.parallel.operations import (
    NOT_THERE,
    Disagree,
    Drain,
    Load,
    Message,
    Place,
    Poll,
    Program,
    Return,
    Store,
    Value,
    Wait,
)
from decode_impl.parallel.protocol import CONTRIBUTE, GATHER

Parts = Mapping[str, Callable[..., Any]]
"""What programs are made of, by name; see `table.PROTOCOL`."""


@dataclass(frozen=True)
class Call:
    """One rank's part of one collective on one tile.

    `finished` is the tile's epoch; `pieces` is this rank's payload, cut into pieces: one per rank for a two-shot call.
    `add(parts)` sums one piece over all ranks, given in rank order.
    """

    rank: int
    ranks: int
    tile: int
    finished: int
    pieces: Sequence[Value]
    add: Callable[[Sequence[Value]], Value]

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all begin with the same one."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def flag(self, of: int, source: int) -> Place:
        """The word in which `source` tells rank `of`."""
        return Place(of, "flag", (self.tile, source))

    def mail(self, p: Parts, of: int, epoch: int, stage: int, source: int, piece: int) -> Place:
        """Where rank `of` finds a piece of what `source` sends it."""
        return Place(of, "mail", (p["mail_index"](self.tile, p["slot"](epoch), stage, source, self.ranks), piece))


def send(p: Parts, call: Call, epoch: int, stage: int, mail: Mapping[int, Mapping[int, Value]], value: int) -> Program:
    """Put pieces into peers' mail, `mail[peer][piece]`, then tell all of them with release."""
    for peer, pieces in mail.items():
        for piece, content in pieces.items():
            yield Store(call.mail(p, peer, epoch, stage, call.rank, piece), content)
    for peer in mail:
        yield Store(call.flag(peer, call.rank), value, release=True)


def await_flag(p: Parts, call: Call, epoch: int, source: int, wanted: int) -> Program:
    """Wait until `source` has told this rank at least `wanted`."""
    place, in_slot, ready = call.flag(call.rank, source), p["slot"](epoch), p["is_ready"]
    yield Wait(place, lambda flag: ready(flag, wanted), source, epoch, in_slot)


def receive(p: Parts, call: Call, epoch: int, stage: int, source: int, wanted: int, pieces: Sequence[int]) -> Program:
    """Wait for a peer's flag, then read its pieces. Returns them by number."""
    yield from p["await_flag"](p, call, epoch, source, wanted)
    found = {}
    for piece in pieces:
        place = call.mail(p, call.rank, epoch, stage, source, piece)
        found[piece] = yield Load(place, Message(stage, source, piece))
    return found


def in_rank_order(call: Call, own: Mapping[int, Value], received: Mapping[int, Mapping[int, Value]], piece: int) -> Any:
    """The sum of one piece over all ranks."""
    return call.add([(own if r == call.rank else received[r])[piece] for r in range(call.ranks)])


def one_shot(p: Parts, call: Call) -> Program:
    """Everybody sends everything to everybody, and adds it up. Returns the tile's epoch."""
    epoch = p["next_epoch"](call.finished)
    own = dict(enumerate(call.pieces))
    told = p["flag_value"](epoch, GATHER)
    yield from p["send"](p, call, epoch, CONTRIBUTE, dict.fromkeys(call.peers, own), told)
    received = {}
    for peer in call.peers:
        received[peer] = yield from p["receive"](p, call, epoch, CONTRIBUTE, peer, told, list(own))
    yield Return(tuple(in_rank_order(call, own, received, piece) for piece in own))
    return epoch


def two_shot(p: Parts, call: Call) -> Program:
    """Rank r adds up piece r and sends the sum to all. Returns the tile's epoch."""
    epoch = p["next_epoch"](call.finished)
    own, mine = dict(enumerate(call.pieces)), call.rank
    told = p["flag_value"](epoch, CONTRIBUTE)
    yield from p["send"](p, call, epoch, CONTRIBUTE, {peer: {peer: own[peer]} for peer in call.peers}, told)
    received = {}
    for peer in call.peers:
        received[peer] = yield from p["receive"](p, call, epoch, CONTRIBUTE, peer, told, [mine])
    total = {mine: in_rank_order(call, own, received, mine)}
    told = p["flag_value"](epoch, GATHER)
    yield from p["send"](p, call, epoch, GATHER, dict.fromkeys(call.peers, total), told)
    for peer in call.peers:
        total |= yield from p["receive"](p, call, epoch, GATHER, peer, told, [peer])
    yield Return(tuple(total[piece] for piece in sorted(total)))
    return epoch


def in_place(p: Parts, call: Call) -> Program:
    """Everybody reads everybody's input where it lies, between an entry and an exit barrier. Returns the epoch."""
    epoch = p["next_epoch"](call.finished)
    own = dict(enumerate(call.pieces))
    for piece, content in own.items():
        yield Store(Place(call.rank, "input", (call.tile, piece)), content)
    yield from p["barrier"](p, call, epoch, CONTRIBUTE)
    received: dict[int, dict[int, Value]] = {peer: {} for peer in call.peers}
    for peer in call.peers:
        for piece in own:
            place = Place(peer, "input", (call.tile, piece))
            received[peer][piece] = yield Load(place, Message(CONTRIBUTE, peer, piece))
    yield from p["exit_barrier"](p, call, epoch, GATHER)
    yield Return(tuple(in_rank_order(call, own, received, piece) for piece in own))
    return epoch


def barrier(p: Parts, call: Call, epoch: int, stage: int) -> Program:
    """Tell all, and wait for all."""
    told = p["flag_value"](epoch, stage)
    yield from p["send"](p, call, epoch, stage, {peer: {} for peer in call.peers}, told)
    for peer in call.peers:
        yield from p["await_flag"](p, call, epoch, peer, told)


def mail_without_flags(p: Parts, call: Call) -> Program:
    """The one-shot sum over mail in which payload itself says that it is there. Returns the tile's epoch."""
    epoch = p["next_epoch"](call.finished)
    own = dict(enumerate(call.pieces))
    for peer in call.peers:
        for piece, content in own.items():
            yield Store(call.mail(p, peer, epoch, CONTRIBUTE, call.rank, piece), content, into_armed=True)
    received: dict[int, dict[int, Value]] = {peer: {} for peer in call.peers}
    for peer in call.peers:
        for piece in own:
            place, message = call.mail(p, call.rank, epoch, CONTRIBUTE, peer, piece), Message(CONTRIBUTE, peer, piece)
            received[peer][piece] = yield Poll(place, message, peer, epoch, p["slot"](epoch))
    yield from p["rearm"](p, call, epoch)
    yield Drain()
    yield Return(tuple(in_rank_order(call, own, received, piece) for piece in own))
    return epoch


def rearm(p: Parts, call: Call, epoch: int) -> Program:
    """Fill what was read with the sentinel."""
    for peer in call.peers:
        for piece in range(len(call.pieces)):
            index = p["mail_index"](call.tile, p["rearmed_slot"](epoch), CONTRIBUTE, peer, call.ranks)
            yield Store(Place(call.rank, "mail", (index, piece)), NOT_THERE)


def agree(p: Parts, call: Call) -> Program:
    """Exchange one word, the digest of what this rank decided; who sees another one gives up. Returns the epoch."""
    epoch = p["next_epoch"](call.finished)
    own, told = {0: call.pieces[0]}, p["flag_value"](epoch, GATHER)
    yield from p["send"](p, call, epoch, CONTRIBUTE, dict.fromkeys(call.peers, own), told)
    for peer in call.peers:
        found = yield from p["receive"](p, call, epoch, CONTRIBUTE, peer, told, [0])
        if found[0] != own[0]:
            yield Disagree(peer, epoch, p["slot"](epoch))
    yield Return(())
    return epoch
