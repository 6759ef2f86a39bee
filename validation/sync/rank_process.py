"""One rank as a process of its own: it runs the collectives' programs on shared memory, as a stress plan says.

    python -m validation.sync.rank_process FOLDER RANK

FOLDER has `jobs.json` (a list of plans) and `memory`; the rank writes `outcomes-RANK.jsonl`, one line a job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from decode_impl.parallel.errors import CollectiveError, RankAborted, RankDisagreed, RankTimeout
from decode_impl.parallel.operations import NOT_THERE, Add, Disagree, Drain, Load, Poll, Return, Store, Wait
from decode_impl.parallel.programs import Call, Parts
from decode_impl.parallel.protocol import SENTINEL, is_over
from decode_impl.parallel.table import collectives
from validation.sync.faulty import with_fault
from validation.sync.shared_memory import ABORT, AGREEMENT, FIRST, FLAGLESS, IN_PLACE, READY, WORDS, SharedMemory
from validation.sync.stress_plan import LAYERS, StressPlan, plan_from

_START_LIMIT_NS = 30_000_000_000
_SPINS, _NAP_S, _LONGEST = 20, 5e-6, 200
"""A rank that has looked so often sleeps between looks, longer each time: there may be fewer cores than ranks."""

_POISON = 0x7FC0_7FC0
_FIRST_TILE = {"one_shot": FIRST, "two_shot": FIRST, "in_place": IN_PLACE, "mail_without_flags": FLAGLESS}


class WrongResult(Exception):
    """A sum that is not the sum of this step's payload."""


class Rank:
    """One rank in one job."""

    def __init__(self, plan: StressPlan, memory: SharedMemory, rank: int) -> None:
        self.plan, self.memory, self.rank = plan, memory, rank
        self.parts: Parts = with_fault(collectives(), plan.fault) if plan.fault else collectives()
        self.limit = plan.limit_ms * 1_000_000
        self.delays = {(d.step, d.point, d.occurrence): d.microseconds for d in plan.delays if d.rank == rank}
        self.applied: Counter[str] = Counter()
        self.epochs: Counter[int] = Counter()
        self.digest = 0
        self.step = self.layer = 0
        self.waited = 0
        self._seen: Counter[str] = Counter()

    def run(self) -> None:
        """All steps of the plan.

        Raises:
            CollectiveError: a wait was not answered in time, a peer gave up, or ranks disagree.
            WrongResult: a wrong sum.
        """
        for step, (kind, tiles) in enumerate(self.plan.calls()):
            self.step, self.layer = step, 0
            self._seen.clear()
            self._stop()
            odd = self.plan.odd_one == (self.rank, self.step)
            self._call("agree", AGREEMENT, [zlib.crc32(kind.encode()) ^ odd])
            if odd:
                kind = "one_shot" if kind == "two_shot" else "two_shot"
            first, pieces = _FIRST_TILE[kind], self.plan.ranks if kind == "two_shot" else 1
            for layer in range(LAYERS):
                self.layer = layer
                for tile in range(first, first + (tiles if first == FIRST else 1)):
                    self._call(kind, tile, [self._payload(self.rank, tile, piece) for piece in range(pieces)])

    def _payload(self, rank: int, tile: int, piece: int) -> Any:
        return payload(rank, self.step * LAYERS + self.layer, tile, piece)

    def _stop(self) -> None:
        if self.plan.stop != (self.rank, self.step):
            return
        if self.plan.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * self.plan.limit_ms / 1000)

    def _call(self, kind: str, tile: int, pieces: list[Any]) -> None:
        call = Call(self.rank, self.plan.ranks, tile, self.epochs[tile], pieces, in_order)
        program = self.parts[kind](self.parts, call)
        inputs, answer = [], None
        while True:
            try:
                operation = program.send(answer)
            except StopIteration as done:
                self.epochs[tile] = done.value
                break
            answer = self._carry_out(operation, tile)
            if isinstance(operation, Store) and operation.place.area == "input":
                inputs.append(self.memory.view(operation.place))
        for view in inputs:
            view[:] = _POISON

    def _carry_out(self, operation: Any, tile: int) -> Any:
        if isinstance(operation, Store):
            flag = operation.place.area == "flag"
            self._delay("flag" if flag else "data")
            self.memory.view(operation.place)[:] = SENTINEL if operation.value is NOT_THERE else operation.value
        elif isinstance(operation, Wait):
            self._delay("wait")
            view = self.memory.view(operation.place)
            self._spin(operation, lambda: operation.ready(int(view[0])))
        elif isinstance(operation, Poll):
            self._delay("wait")
            view = self.memory.view(operation.place)
            self._spin(operation, lambda: not (view == SENTINEL).any())
            return view.copy()
        elif isinstance(operation, Load):
            self._delay("read")
            view = self.memory.view(operation.place)
            return int(view[0]) if tile == AGREEMENT else view.copy()
        elif isinstance(operation, Return):
            self._delay("return")
            self._check(operation, tile)
        elif isinstance(operation, Disagree):
            self._give_up()
            why = f"rank {operation.source} decided otherwise about step {self.step}"
            raise RankDisagreed(why, **self._where(operation))
        elif not isinstance(operation, Drain | Add):
            raise TypeError(f"unknown operation {operation!r}")
        return None

    def _spin(self, operation: Wait | Poll, ready: Any) -> None:
        start, spins = time.monotonic_ns(), 0
        while not ready():
            self.waited = time.monotonic_ns() - start
            if self.memory.control[self.rank][ABORT]:
                self._give_up()
                raise RankAborted("a peer gave up", **self._where(operation))
            if is_over(self.waited, 0, self.limit):
                self._give_up()
                why = f"rank {operation.source} did not answer within {self.plan.limit_ms} ms in step {self.step}"
                raise RankTimeout(why, **self._where(operation))
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_NAP_S * min(spins, _LONGEST))

    def _where(self, operation: Wait | Poll | Disagree) -> dict[str, int]:
        return {"rank": self.rank, "slot": operation.slot, "epoch": operation.epoch, "source": operation.source}

    def _give_up(self) -> None:
        for control in self.memory.control:
            control[ABORT] = 1

    def _delay(self, point: str) -> None:
        occurrence = self._seen[point]
        self._seen[point] += 1
        microseconds = self.delays.get((self.step, point, occurrence), 0)
        if microseconds:
            self.applied[point] += 1
            time.sleep(microseconds / 1e6)

    def _check(self, operation: Return, tile: int) -> None:
        for piece, value in enumerate(operation.values):
            right = in_order([self._payload(rank, tile, piece) for rank in range(self.plan.ranks)])
            if not np.array_equal(value, right):
                wrong = int((value != right).sum())
                raise WrongResult(f"{wrong} of {WORDS} words are wrong in step {self.step}, tile {tile}, piece {piece}")
            self.digest = zlib.crc32(value.tobytes(), self.digest)


def payload(rank: int, call: int, tile: int, piece: int) -> Any:
    """Payload, FP32 as 32-bit words, that no other rank, tile, piece, position or call within hundreds has."""
    base = np.float32(((rank * 409 + call) % 1021 * 5 + tile) * 17 + piece)
    return (base + np.arange(WORDS, dtype=np.float32) / np.float32(WORDS)).view(np.uint32)


def in_order(parts: Any) -> Any:
    """The FP32 sum in rank order, as words."""
    total = parts[0].view(np.float32)
    for part in parts[1:]:
        total = total + part.view(np.float32)
    return total.view(np.uint32)


def outcome_of(plan: StressPlan, memory: SharedMemory, rank: int) -> dict[str, Any]:
    """Run one job and tell how it ended, as plain JSON."""
    runner, error, kind = Rank(plan, memory, rank), "", ""
    try:
        runner.run()
    except (CollectiveError, WrongResult) as problem:
        error, kind = str(problem), type(problem).__name__
        runner._give_up()
    return {
        "rank": rank,
        "steps": runner.step + (not error),
        "digest": runner.digest,
        "error": error,
        "kind": kind,
        "applied": dict(runner.applied),
        "waited_ms": runner.waited // 1_000_000,
    }


def main(folder: Path, rank: int) -> None:
    """Run every job in order; all ranks begin a job together."""
    plans = [plan_from(document) for document in json.loads((folder / "jobs.json").read_text(encoding="utf-8"))]
    with (folder / f"outcomes-{rank}.jsonl").open("w", encoding="utf-8") as file:
        for job, plan in enumerate(plans):
            memory = SharedMemory(folder / "memory", plan.ranks, job)
            memory.arm(rank, plan.ranks)
            memory.control[rank][READY] = 1
            start = time.monotonic_ns()
            while not all(control[READY] for control in memory.control):
                if is_over(time.monotonic_ns(), start, _START_LIMIT_NS):
                    raise TimeoutError(f"job {job}: not all ranks came to the start line")
                time.sleep(0.0001)
            file.write(json.dumps(outcome_of(plan, memory, rank)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
