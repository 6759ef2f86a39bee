"""From options to a mutation run: profile, gates and faults are found, faults injected, the matrix written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from validation.cli.running import faults_named, gates_named
from validation.loading import load_faults
from validation.mutation.request import options_of
from validation.mutation.run import MutationRequest, mutate, resumption
from validation.mutation.smoke import SMOKE, looks_of, with_settings
from validation.profile import DEFAULT_PROFILE, Profile, load_profile, profile_from
from validation.records.storage import RunFolder
from validation.reports.mutation import headline, open_rows, why, write_matrix
from validation.run.environment import default_workers, set_threads
from validation.run.processes import LocalProcesses
from validation.targets.registry import load_target
from validation.verdict import Verdict, exit_code

_PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}


@dataclass(frozen=True)
class MutateOptions:
    """The options of `decodegate mutate`; None where the user said nothing."""

    profile: str | None
    gates: tuple[str, ...]
    model: Path | None
    faults: tuple[str, ...]
    seed: int | None
    threads: int | None
    workers: int | None
    resume: str | None
    stop_at_first: bool
    out: Path


def measure_matrix(options: MutateOptions) -> int:
    """Run as the options say and return the exit code: 0 only if no applicable fault was missed.

    Raises:
        UsageError: something in the options cannot be.
        RunInterrupted: the run was stopped and can be resumed.
    """
    if options.resume is None:
        name, profile = load_profile(options.profile or DEFAULT_PROFILE)
    else:
        options, name, profile = _resumed(options, options.resume)
    request = _request(options, name, profile)
    set_threads(options.threads)
    target = load_target(profile.target.kind, options.model or profile.model.folder())
    console = Console()

    def opened(folder: RunFolder) -> None:
        console.print(f"run {escape(str(folder.path))}; where it stops, {escape(resumption(folder))} goes on", **_PLAIN)

    def told(fault: str, done: int, total: int) -> None:
        console.print(f"{done}/{total} {escape(fault)}", highlight=False)

    executor = LocalProcesses(options.workers or default_workers())
    folder, matrix = mutate(
        request, target, options.out, resume=options.resume, executor=executor, told=told, opened=opened
    )
    page = write_matrix(folder, matrix)
    for row in open_rows(matrix):
        console.print(f"{row.outcome}: {escape(row.fault)}: {escape(row.title)}. {escape(why(row))}", highlight=False)
    for gate in matrix.gates:
        console.print(f"{gate}: {matrix.score(gate)}", highlight=False)
    console.print(f"{escape(headline(matrix))}\n{escape(str(page))}", **_PLAIN)
    verdict = Verdict.ERROR if not matrix.sound else Verdict.PASS if matrix.passed else Verdict.FAIL
    return exit_code(verdict)


def _request(options: MutateOptions, name: str, profile: Profile) -> MutationRequest:
    """What to measure. The smoke profile by its name has its own subset of faults and its own settings."""
    gates = gates_named(name, profile, options.gates or None)
    chosen = faults_named(options.faults) or tuple(load_faults().values())
    kept = {**_typed(options), "content of the profile": profile.content()}
    request = MutationRequest(
        profile_name=name,
        profile=profile,
        gates=gates,
        faults=chosen,
        seed=options.seed or 0,
        first_only=options.stop_at_first,
        command=_command(options),
        options=kept,
    )
    if options.profile != SMOKE or options.faults:
        return request
    looks = looks_of([gate.name for gate in gates])
    faults = tuple(fault for fault in chosen if fault.id in looks)
    asked = profile.model_copy(update={"gates": with_settings(profile.gates)})
    return replace(request, profile=asked, faults=faults, looks=looks, first_only=True)


def _resumed(options: MutateOptions, run: str) -> tuple[MutateOptions, str, Profile]:
    """The options that a run was started with, its profile's name and the profile as it was then.

    Raises:
        UsageError: no such run, or an option that is given contradicts it.
    """
    given = _typed(options, spoken=True)
    said = {
        option: value for option, value in given.items() if value is not None and value is not False and value != []
    }
    before = options_of(RunFolder.find(options.out, run), said)
    if options.profile is None:
        name, profile = Path(before.profile).stem, profile_from(before.content, f"profile of run {run}")
    else:
        name, profile = load_profile(options.profile)
    then = replace(
        options,
        profile=before.profile,
        gates=tuple(before.gates),
        model=None if before.model is None else Path(before.model),
        faults=tuple(before.faults),
        seed=before.seed,
        threads=before.threads,
        stop_at_first=before.stop_at_first,
    )
    return then, name, profile


def _typed(options: MutateOptions, spoken: bool = False) -> dict[str, Any]:
    """The options that decide what is measured, as they are typed; with their defaults unless `spoken`."""
    return {
        "--profile": options.profile or (None if spoken else DEFAULT_PROFILE),
        "--gate": sorted(options.gates),
        "--model": None if options.model is None else str(options.model),
        "--fault": sorted(options.faults),
        "--seed": options.seed if spoken else options.seed or 0,
        "--threads": options.threads if spoken else options.threads or 1,
        "--stop-at-first": options.stop_at_first,
    }


def _command(options: MutateOptions) -> tuple[str, ...]:
    words = ["decodegate", "mutate", "--profile", options.profile or DEFAULT_PROFILE]
    for gate in options.gates:
        words += ["--gate", gate]
    for fault in options.faults:
        words += ["--fault", fault]
    words += ["--stop-at-first"] if options.stop_at_first else []
    return (*words, "--seed", str(options.seed or 0))
