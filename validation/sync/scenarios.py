"""What the gate explores: every protocol over several epochs, changing shapes, wraps, stalls and replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from decode_impl.parallel.programs import Parts
from validation.sync.scenario import Collective, Scenario

_WRAP_AT = 2
"""Epoch before the first call: words of three bits wrap from 3 to -4, and flags, which grow twice as fast, before."""


def collectives(ranks: int) -> list[Scenario]:
    """Scenarios of the sums over ranks, in which all ranks live and agree."""
    one, wide = Collective("one_shot"), Collective("one_shot", pieces=2)
    two = Collective("two_shot", pieces=ranks)
    place, flagless = Collective("in_place"), Collective("mail_without_flags")
    agree = Collective("agree", decisions=(7,) * ranks)
    layers = 4 if ranks < 4 else 2
    made = {
        "one-shot": (one,) * 5,
        "two-shot": (two,) * 2 if ranks > 2 else (two,) * 4,
        "alternating": (one, two, one, two) if ranks < 3 else (one, two, one),
        "pieces": (wide,) * 2 if ranks > 2 else (wide,) * 4,
        "batch-grows-and-shrinks": tuple(replace(one, tiles=n) for n in (1, 2, 1, 2)),
        "replay": (agree, one, one, one, agree, one, one, one),
        "in-place": (place,) * layers,
        "without-flags": (flagless,) * layers,
    }
    return [Scenario(f"{name}-{ranks}", ranks, calls, epoch=_WRAP_AT) for name, calls in made.items()]


def disagreement(ranks: int) -> Scenario:
    """The last rank decides otherwise in the second step, and goes the way that it decided for."""
    agreed, split = (7,) * ranks, (7,) * (ranks - 1) + (8,)
    steps = (Collective("agree", decisions=agreed), Collective("one_shot"))
    programs = ("one_shot",) * (ranks - 1) + ("two_shot",)
    odd = (Collective("agree", decisions=split), Collective(programs, pieces=ranks))
    return Scenario(f"disagreement-{ranks}", ranks, (*steps, *odd))


def stalls(parts: Parts, ranks: int) -> Iterator[Scenario]:
    """Rank 0 dies at each of its operations in turn; any rank may lose patience at any wait."""
    one, two = Collective("one_shot"), Collective("two_shot", pieces=ranks)
    agree = Collective("agree", decisions=(7,) * ranks)
    for name, calls in (("one-shot", (agree, one, agree)), ("two-shot", (two, agree))):
        whole = Scenario(f"stall-{name}-{ranks}", ranks, calls, timeouts=True)
        for at in range(whole.length(parts, 0)):
            yield replace(whole, name=f"{whole.name}-at-{at}", stop=(0, at))


def launches() -> list[Scenario]:
    """What launches, streams and the host rely on; agents are warps, thread blocks, streams or host and device."""
    sizes = (
        ("broadcast", 3, 1),
        ("planner", 3, 1),
        ("layer_chain", 2, 3),
        ("partial_sums", 2, 1),
        ("split_partial", 2, 1),
        ("dependent_launch", 2, 1),
        ("cluster_read", 2, 1),
        ("counts_to_host", 2, 1),
        ("staging", 2, 1),
        ("two_streams", 2, 1),
    )
    return [
        Scenario(f"{name.replace('_', '-')}-{agents}", agents, (Collective(name, pieces=pieces),) * 3)
        for name, agents, pieces in sizes
    ]


def all_scenarios(parts: Parts, ranks: Sequence[int]) -> list[Scenario]:
    """Every scenario with these rank counts."""
    found = launches()
    for count in ranks:
        found += [*collectives(count), disagreement(count), *stalls(parts, count)]
    return found
