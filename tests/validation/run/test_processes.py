"""Local processes measure what one process measures; a worker that dies loses its unit and never hides it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import decodegate_toy as toy

from validation.faults.catalogue import FAULTS
from validation.gates.base import Context, Unit
from validation.run.executor import Failed, InProcess, Measured
from validation.run.processes import LocalProcesses
from validation.targets.base import ArmConfig

UNITS = [Unit(f"rows-{n}", {"rows": n}) for n in (1, 2, 4, 8)]


def context(faults: tuple[Any, ...] = ()) -> Context:
    candidate = ArmConfig("candidate", decode_backend="latency_specialized", faults=faults)
    return Context(toy.ToyTarget(), ArmConfig("baseline"), candidate, seed=3, settings={"rows": [1, 2, 4, 8]})


class Fragile(toy.ErrorGate):
    """Dies in the unit with four rows."""

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        if unit.params["rows"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid(), "faults": [fault.id for fault in context.candidate.faults]}


def test_two_processes_measure_what_one_measures() -> None:
    def results(executor: Any) -> dict[str, Any]:
        outcomes = list(executor.measure(toy.ErrorGate(), UNITS, context()))
        assert all(isinstance(outcome, Measured) for outcome in outcomes)
        return {outcome.unit.id: (outcome.result, outcome.arms) for outcome in outcomes}

    assert results(LocalProcesses(2)) == results(InProcess())


def test_a_worker_that_dies_fails_its_unit_and_the_others_are_measured() -> None:
    outcomes = list(LocalProcesses(2).measure(Fragile(), UNITS, context()))
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert [outcome.unit.id for outcome in failed] == ["rows-4"]
    assert failed[0].error == "the worker process ended with exit code -9"
    measured = {outcome.unit.id for outcome in outcomes if isinstance(outcome, Measured)}
    assert measured == {"rows-1", "rows-2", "rows-8"}


def test_units_left_without_any_worker_are_failures_too() -> None:
    class_units = [Unit(f"again-{i}", {"rows": 4}) for i in range(4)]
    outcomes = list(LocalProcesses(2).measure(Fragile(), class_units, context()))
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert {outcome.unit.id for outcome in outcomes} == {unit.id for unit in class_units}


def test_a_catalogue_fault_reaches_the_workers() -> None:
    chosen = tuple(FAULTS.values())[:2]
    outcomes = LocalProcesses(2).measure(Fragile(), UNITS[:2], context(chosen))
    seen = [outcome.result["faults"] for outcome in outcomes if isinstance(outcome, Measured)]
    assert seen == [[fault.id for fault in chosen]] * 2


def test_workers_stay_for_the_next_gate_and_a_dead_one_is_replaced() -> None:
    executor = LocalProcesses(2)

    def pids(units: list[Unit]) -> set[int]:
        outcomes = list(executor.measure(Fragile(), units, context()))
        return {outcome.result["pid"] for outcome in outcomes if isinstance(outcome, Measured)}

    first = pids(UNITS[:2] * 2)
    assert pids(UNITS[:2] * 2) <= first
    pids(UNITS[1:3])  # kills one
    assert len(pids(UNITS[:2] * 2) - first) <= 1
    executor.close()
    assert not any(_runs(pid) for pid in first)


def test_a_gate_is_given_its_own_context_by_workers_that_had_another() -> None:
    executor = LocalProcesses(2)
    for chosen in (tuple(FAULTS.values())[:2], (), tuple(FAULTS.values())[2:3]):
        outcomes = list(executor.measure(Fragile(), UNITS[:2], context(chosen)))
        seen = [outcome.result["faults"] for outcome in outcomes if isinstance(outcome, Measured)]
        assert seen == [[fault.id for fault in chosen]] * 2


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_gone(pid: int) -> bool:
    """Whether the process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "\nState:\tZ" in status.read_text():
            return True  # Ended; what adopted it has not asked how.
        time.sleep(0.05)
    return False


def test_no_worker_outlives_a_caller_that_stops_asking() -> None:
    outcomes = LocalProcesses(2).measure(Fragile(), UNITS[:2] * 2, context())
    first = next(outcomes)
    assert isinstance(first, Measured)
    outcomes.close()  # type: ignore[attr-defined]
    assert is_gone(first.result["pid"]), "a worker still runs"


class Asleep(toy.ErrorGate):
    """Leaves its process id in the folder PIDS and takes a minute."""

    def measure(self, unit: Unit, context: Context) -> dict[str, Any]:
        (Path(os.environ["PIDS"]) / str(os.getpid())).touch()
        time.sleep(60)
        return {}


def test_no_worker_finishes_its_unit_for_a_caller_that_was_killed(tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = "import test_processes as t; list(t.LocalProcesses(2).measure(t.Asleep(), t.UNITS[:2], t.context()))"
    paths = os.pathsep.join(map(str, (here, here.parent, here.parents[2])))
    caller = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths, "PIDS": str(tmp_path)}
    )
    deadline = time.monotonic() + 120
    while len(workers := [int(path.name) for path in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    assert len(workers) == 2
    assert all(map(is_gone, workers))
