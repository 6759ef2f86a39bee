"""From options to a mutation run: profile, gates and faults are found, faults injected, the matrix written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from validation.cli.running import faults_named, gates_named
from validation.environment import default_workers, set_threads
from validation.faults.base import Fault
from validation.loading import load_faults
from validation.mutation.run import MutationRequest, mutate
from validation.processes import LocalProcesses
from validation.profile import DEFAULT_PROFILE, load_profile
from validation.reports.mutation import headline, open_rows, why, write_matrix
from validation.storage import RunFolder
from validation.targets.registry import load_target
from validation.verdict import Verdict, exit_code

SMOKE = "smoke"
"""With this profile one fault of every layer and kind is injected, and the first gate that catches it ends it."""


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
    if options.resume is not None:
        RunFolder.find(options.out, options.resume)
    name, profile = load_profile(options.profile or DEFAULT_PROFILE)
    smoke = name == SMOKE and not options.faults
    chosen = faults_named(options.faults) or tuple(load_faults().values())
    request = MutationRequest(
        profile_name=name,
        profile=profile,
        gates=gates_named(name, profile, options.gates or None),
        faults=one_of_each(chosen) if smoke else chosen,
        seed=options.seed or 0,
        first_only=smoke or options.stop_at_first,
        command=_command(options),
    )
    set_threads(options.threads)
    target = load_target(profile.target.kind, options.model or profile.model.folder())
    console = Console()

    def told(fault: str, done: int, total: int) -> None:
        console.print(f"{done}/{total} {escape(fault)}", highlight=False)

    executor = LocalProcesses(options.workers or default_workers())
    folder, matrix = mutate(request, target, options.out, resume=options.resume, executor=executor, told=told)
    page = write_matrix(folder, matrix)
    for row in open_rows(matrix):
        console.print(f"{row.outcome}: {escape(row.fault)}: {escape(row.title)}. {escape(why(row))}", highlight=False)
    for gate in matrix.gates:
        console.print(f"{gate}: {matrix.score(gate)}", highlight=False)
    console.print(f"{escape(headline(matrix))}\n{escape(str(page))}", highlight=False, soft_wrap=True)
    verdict = Verdict.ERROR if not matrix.sound else Verdict.PASS if matrix.passed else Verdict.FAIL
    return exit_code(verdict)


def one_of_each(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """The first injectable fault of every layer and kind, and everything that is only declared."""
    first: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        if fault.injectable:
            first.setdefault((fault.layer, fault.kind), fault)
    return tuple(fault for fault in faults if not fault.injectable or first[fault.layer, fault.kind] is fault)


def _command(options: MutateOptions) -> tuple[str, ...]:
    words = ["decodegate", "mutate", "--profile", options.profile or DEFAULT_PROFILE]
    for gate in options.gates:
        words += ["--gate", gate]
    for fault in options.faults:
        words += ["--fault", fault]
    words += ["--stop-at-first"] if options.stop_at_first else []
    return (*words, "--seed", str(options.seed or 0))
