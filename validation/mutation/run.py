"""A mutation run: faults go to processes, every result is kept as it comes, the matrix is written at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from validation.errors import RunInterrupted, UsageError
from validation.faults.base import Fault
from validation.gates.base import Context, Gate, Json, Unit
from validation.gates.registry import by_layer
from validation.mutation.matrix import Matrix, row_of
from validation.mutation.measure import HEALTHY, MutationGate
from validation.mutation.plan import can_see, components_first, units_for
from validation.mutation.request import OPTIONS, started_with
from validation.mutation.smoke import Looks, OneLook, used
from validation.profile import Profile, check_settings
from validation.records.jsonio import digest, named, pretty
from validation.records.record import UnitResult, arm_doc
from validation.records.storage import RunFolder, new_run_id
from validation.run.environment import environment
from validation.run.executor import Executor, Failed, InProcess
from validation.run.version import code_version
from validation.targets.base import Capability, Target

Told = Callable[[str, int, int], None]
"""Is told of every finished fault: its id, how many are done, of how many."""

Opened = Callable[[RunFolder], None]
"""Is told of the run's folder before anything is measured."""

MATRIX = "matrix.json"
_GATE = "mutate"


@dataclass(frozen=True)
class MutationRequest:
    """What to inject, which gates to ask, with the settings of which profile.

    `looks`: the one unit that is asked about each fault; None: every unit that can see it. `options`: what the run's
    folder keeps for its resumption.
    """

    profile_name: str
    profile: Profile
    gates: Sequence[Gate]
    faults: Sequence[Fault]
    seed: int = 0
    first_only: bool = False
    command: tuple[str, ...] = ()
    looks: Looks | None = None
    options: Mapping[str, Json] = field(default_factory=dict)


def mutate(
    request: MutationRequest,
    target: Target,
    out: Path,
    *,
    resume: str | None = None,
    executor: Executor | None = None,
    told: Told = lambda fault, done, total: None,
    opened: Opened = lambda folder: None,
) -> tuple[RunFolder, Matrix]:
    """Inject every fault that can be, ask the gates, and keep everything in `<out>/<id>/`.

    Raises:
        UsageError: the target cannot be broken, settings that cannot be, or a folder that cannot be written.
        RunInterrupted: after KeyboardInterrupt, with every finished fault kept.
    """
    if Capability.INJECT_FAULT not in target.capabilities:
        raise UsageError(f"target {target.name!r} lacks the capability 'inject a fault'; nothing can be mutated")
    if not any(fault.injectable for fault in request.faults):
        raise UsageError("none of these faults can be injected: they are only declared; see decodegate faults")
    check_settings(request.profile, request.gates)
    folder = RunFolder.find(out, resume) if resume is not None else RunFolder.create(out, new_run_id(datetime.now(UTC)))
    with folder.lock():
        started_with(folder, _asked_for(request, target), resuming=resume is not None)
        opened(folder)
        try:
            said = _said(request, target, folder, executor or InProcess(), told)
        except KeyboardInterrupt:
            folder.log("interrupted")
            raise RunInterrupted(f"interrupted; go on with: {resumption(folder)}") from None
        matrix = _matrix(request, target, folder.run_id, said)
        folder.write(pretty(named(matrix.as_json())), MATRIX)
        folder.log(f"mutation score {matrix.score()}")
    return folder, matrix


def resumption(folder: RunFolder) -> str:
    """The command that goes on with a run."""
    out = "" if str(folder.path.parent) == "runs" else f" --out {shlex.quote(str(folder.path.parent))}"
    return f"decodegate mutate --resume {folder.run_id}{out}"


def _said(
    request: MutationRequest, target: Target, folder: RunFolder, executor: Executor, told: Told
) -> dict[str, Mapping[str, Json]]:
    """What the gates say by fault, kept results first used; under HEALTHY what they say without one."""
    gates = by_layer(list(request.gates))
    settings = {gate.name: request.profile.gates[gate.name] for gate in gates}
    gate = MutationGate(settings, target, request.first_only)
    if request.looks is not None:
        gate = OneLook(settings, target, request.first_only, looks=request.looks)
    context = Context(
        target=target,
        baseline=request.profile.baseline.arm("baseline"),
        candidate=request.profile.candidate.arm("candidate"),
        seed=request.seed,
        settings={},
    )
    faults = [fault for fault in components_first(request.faults) if fault.injectable]
    healthy = _used(gates, settings, faults, context)
    if request.looks is not None:
        healthy = {name: used(request.looks, name) for name in settings}
    # The healthy run is the costliest of all; an executor of several processes starts with what is last.
    units = [*(Unit(f.id) for f in faults), Unit(HEALTHY, {"units": healthy})]
    identities = {unit.id: _identity(request, gate, unit, context) for unit in units}
    said: dict[str, Mapping[str, Json]] = {}
    for unit in units:
        kept = folder.read_unit(_GATE, unit.id, identities[unit.id])
        if kept is not None:
            said[unit.id] = kept.result
    for outcome in executor.measure(gate, [u for u in units if u.id not in said], context):  # type: ignore[arg-type]
        if isinstance(outcome, Failed):
            folder.log(f"{outcome.unit.id}:\n{outcome.traceback}")
            said[outcome.unit.id] = {gate.name: {"says": "error", "units": 0, "reason": outcome.error}}
            continue
        result = UnitResult(
            gate=_GATE,
            unit=outcome.unit.id,
            identity=identities[outcome.unit.id],
            result=outcome.result,
            arms={},
            seconds=outcome.seconds,
        )
        folder.write_unit(result)
        said[outcome.unit.id] = outcome.result
        told(outcome.unit.id, len(said), len(units))
    return said


def _used(
    gates: Sequence[Gate], settings: Mapping[str, Any], faults: Sequence[Fault], context: Context
) -> dict[str, list[str]]:
    """Every unit that some fault is judged on, by gate: those that must be green without a fault."""
    used: dict[str, list[str]] = {}
    for gate in gates:
        own = Context(context.target, context.baseline, context.candidate, context.seed, settings[gate.name])
        # All that `units_for` chooses by: faults alike in it are asked of the same units.
        alike = {(f.component, f.paths, f.layer, f.gate): f for f in faults if can_see(gate, f)}
        names = {unit.id for fault in alike.values() for unit in units_for(gate, own, fault)}
        used[gate.name] = sorted(names)
    return used


def _identity(request: MutationRequest, gate: MutationGate, unit: Unit, context: Context) -> str:
    """Digest of everything that the result of one fault depends on."""
    return digest(
        {
            "decodegate": code_version(),
            "commit": environment().git_commit,
            "seed": request.seed,
            "target": dict(context.target.fingerprint()),
            "arms": [arm_doc(context.baseline), arm_doc(context.candidate)],
            "settings": named(gate.settings),
            "first": request.first_only,
            "look": list(request.looks.get(unit.id, ())) if request.looks is not None else None,
            "unit": [unit.id, named(unit.params)],
        }
    )


def _matrix(request: MutationRequest, target: Target, run_id: str, said: Mapping[str, Any]) -> Matrix:
    here = environment()
    names = tuple(gate.name for gate in by_layer(list(request.gates)))
    about = {
        "run": run_id,
        "created": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": " ".join(request.command),
        "profile": request.profile_name,
        "seed": request.seed,
        "first_only": request.first_only,
        "target": dict(target.fingerprint()),
        "environment": {"platform": here.platform, "torch": here.torch, "git_commit": here.git_commit},
    }
    timeless = {unit: {gate: _without_seconds(answer) for gate, answer in own.items()} for unit, own in said.items()}
    seconds = {unit: {gate: a["seconds"] for gate, a in own.items() if "seconds" in a} for unit, own in said.items()}
    rows = tuple(row_of(fault, timeless.get(fault.id), names) for fault in request.faults)
    return Matrix(names, rows, timeless.get(HEALTHY, {}), about, {unit: seconds[unit] for unit in sorted(seconds)})


def _without_seconds(answer: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in answer.items() if key != "seconds"}


def _asked_for(request: MutationRequest, target: Target) -> dict[str, Json]:
    """All that a measurement depends on; a resumed run must be asked for the same."""
    here = environment()
    settings = {gate.name: request.profile.gates[gate.name] for gate in request.gates}
    arms = [arm_doc(request.profile.baseline.arm("baseline")), arm_doc(request.profile.candidate.arm("candidate"))]
    return {
        "profile": request.profile_name,
        "settings of the gates": named(settings),
        "gates": sorted(settings),
        "arms": arms,
        "faults": sorted(fault.id for fault in request.faults),
        "seed": request.seed,
        "--stop-at-first": request.first_only,
        OPTIONS: dict(request.options),
        "model": dict(target.fingerprint()),
        "version": code_version(),
        "commit": here.git_commit,
    }
