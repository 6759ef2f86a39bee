"""An executor of local processes: each measures one unit at a time, on as many threads as the parent uses."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from validation.gates.base import Context, Gate, Unit
from validation.run.executor import Failed, InProcess, Outcome, measure_unit


class LocalProcesses:
    """Measures units in `workers` processes, which stay for the next gate: starting one takes seconds.

    Gate, target and context travel by pickle once per worker and gate; a target is expected to pickle as the way to
    load it. A worker that dies makes its unit an outcome that failed, and the rest goes on. Workers end when the caller
    stops asking, with this executor, and with the caller, in the middle of a unit too when that is killed.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._idle: list[_Worker] = []

    def close(self) -> None:
        """End the workers that wait for a gate; another gate starts new ones."""
        self._end(self._idle)
        self._idle = []

    __del__ = close

    def measure(self, gate: Gate, units: Sequence[Unit], context: Context) -> Iterator[Outcome]:
        """Outcomes as they come. Plans tend to put the costly units last; they are started first."""
        count = min(self._workers, len(units))
        if count < 2:
            yield from InProcess().measure(gate, units, context)
            return
        waiting, left = list(units), list[_Worker]()
        workers = [self._idle.pop() if self._idle else _Worker() for _ in range(count)]
        try:
            for worker in workers:
                worker.turn_to(gate, context)
            busy: dict[Connection, _Worker] = {}
            for worker in workers:
                worker.start(waiting.pop())
                busy[worker.pipe] = worker
            while busy:
                for pipe in wait(list(busy)):
                    worker = busy.pop(cast(Connection, pipe))
                    outcome, alive = worker.result()
                    yield outcome
                    if waiting and alive:
                        worker.start(waiting.pop())
                        busy[worker.pipe] = worker
                    elif alive:
                        left.append(worker)
            yield from (_lost(unit, "no worker is left to measure it") for unit in waiting)
            self._idle += left
        finally:
            self._end([worker for worker in workers if worker not in self._idle])

    @staticmethod
    def _end(workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        threads = torch.get_num_threads()
        self._process: BaseProcess = spawn.Process(target=_serve, args=(theirs, threads), daemon=True)
        self._process.start()
        theirs.close()
        self._unit: Unit | None = None

    def turn_to(self, gate: Gate, context: Context) -> None:
        """The units that follow are of this gate."""
        self._send((gate, context))

    def start(self, unit: Unit) -> None:
        self._unit = unit
        self._send(unit)

    def _send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            # The worker is gone; its closed pipe will say so when the result is asked for.
            return

    def result(self) -> tuple[Outcome, bool]:
        """The outcome of the unit started last, and whether the worker can go on."""
        assert self._unit is not None
        try:
            return cast(Outcome, self.pipe.recv()), True
        except (EOFError, OSError):
            self._process.join()
            return _lost(self._unit, f"the worker process ended with exit code {self._process.exitcode}"), False

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def _lost(unit: Unit, reason: str) -> Failed:
    return Failed(unit, reason, f"{reason}\n")


def _serve(pipe: Connection, threads: int) -> None:
    """A worker's life: measure what comes through the pipe, a gate with its context and then units, until it closes."""
    # Ctrl-C reaches the whole process group; the parent decides what to do with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    gate: Any = None
    context: Any = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if not isinstance(message, Unit):
            gate, context = message
            continue
        try:
            pipe.send(measure_unit(gate, message, context))
        except OSError:
            return


def _end_with_parent() -> None:
    """End in the middle of a unit, which may take a quarter of an hour: nobody is left to have its result."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
