"""Searches by seed and fault, in this process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache

import torch

from validation.faults.base import Fault, Kind
from validation.fuzz.corners import corners
from validation.fuzz.files import Subject, fault_named
from validation.fuzz.search import Searched, search
from validation.fuzz.trial import Trial, prepare
from validation.targets.base import ArmConfig
from validation.targets.registry import load_target

PARTS = ("engine", "plan", "build_batch", "state_cache", "latent_cache", "prefix_cache")
"""What a schedule exercises: the scheduler, its caches and the layout of steps. In `kda_verify` it is where states go;
wrong numbers in an op are the numerics gate's, at heads and widths that a miniature does not have."""

RERUN = ("spec-commit-differs-on-rerun",)
"""Faults that no schedule shows against solo runs: what they do is valid, and another thing in every run. The parity
gate's `state-hash` plays a schedule twice."""

PLACES = (Kind.INDEX, Kind.STALE, Kind.OWNERSHIP)


@dataclass(frozen=True)
class Work:
    """One search: what is fuzzed, from which seed, for how many engine steps."""

    subject: Subject
    seed: int
    steps: int


def scheduling_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Those of these faults that a schedule has to show."""
    there = [fault for fault in faults if fault.injectable and not fault.equivalent and fault.gate != "evals"]
    shown = [f for f in there if f.component in PARTS or (f.component == "kda_verify" and f.kind in PLACES)]
    return [fault for fault in shown if fault.id not in RERUN]


def searched(works: Sequence[Work], workers: int) -> Iterator[tuple[Work, Searched]]:
    """The outcomes as they come; in order with one worker."""
    if workers < 2 or len(works) < 2:
        yield from ((work, run(work)) for work in works)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(works)), spawn, torch.set_num_threads, (1,)) as pool:
        waiting = {pool.submit(run, work): work for work in works}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def run(work: Work) -> Searched:
    """One search. Preparing the texts' solo runs is done once per process and model."""
    prepared = _prepared(replace(work.subject, faults=()))
    faults = tuple(fault_named(name) for name in work.subject.faults)
    trial = Trial(prepared.target, replace(prepared.candidate, faults=faults), prepared.reference)
    return search(trial, work.seed, work.steps, first=[case for _, case in corners()])


@cache
def _prepared(subject: Subject) -> Trial:
    candidate = ArmConfig("candidate", decode_backend=subject.decode_backend)
    return prepare(load_target("builtin", subject.model), ArmConfig("baseline"), candidate, subject.small, subject.seed)
