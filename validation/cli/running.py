"""From options to a run: profile, gates, faults and target are found, the runner runs, the reports are written."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from validation.cli.options import MOST_THREADS
from validation.errors import UsageError
from validation.faults.base import Fault
from validation.gates.base import Gate
from validation.gates.registry import load_gate
from validation.loading import load_faults
from validation.profile import DEFAULT_PROFILE, EMBEDDED, ModelSection, Profile, load_profile, profile_from
from validation.records.record import RunRecord
from validation.records.storage import RunFolder
from validation.replay import with_replays
from validation.reports import github, markdown, terminal
from validation.reports.write import write_reports
from validation.run.environment import default_workers, set_threads
from validation.run.processes import LocalProcesses
from validation.run.progress import Lines, Live, Progress
from validation.run.runner import Request, run
from validation.targets.optional import Keeping
from validation.targets.registry import load_target


@dataclass(frozen=True)
class RunOptions:
    """The options of `decodegate run`; None where the user said nothing."""

    profile: str | None
    gates: tuple[str, ...]
    model: Path | None
    faults: tuple[str, ...]
    seed: int | None
    threads: int | None
    workers: int | None
    resume: str | None
    keep_going: bool
    out: Path
    bisect: bool
    github: bool
    given: Profile | None = None
    """A profile that was put together from other options, which `command` repeats."""
    command: tuple[str, ...] = ()
    sanitize: bool = False


def judge(options: RunOptions) -> int:
    """Run as the options say and return the exit code.

    Raises:
        UsageError: something in the options cannot be.
        RunInterrupted: the run was stopped and can be resumed.
    """
    try:
        with github.no_commands(options.github):
            record = _judged(options)
    except UsageError as error:
        if options.github:
            print(github.command("error", "decodegate: nothing was judged", str(error)))
        raise
    if options.github:
        for line in github.workflow_commands(record):
            print(line)
        github.publish_summary(markdown.render(record))
    if record.run.exit_code is None:
        raise RuntimeError("the runner returned an unfinished record")
    return record.run.exit_code


def _judged(options: RunOptions) -> RunRecord:
    """Run, write the reports and show the end of it."""
    earlier = None if options.resume is None else RunFolder.find(options.out, options.resume).read_record()
    request = _request(options, earlier)
    threads = options.threads
    if threads is None and earlier is not None:
        threads = earlier.environment.threads
        if not 1 <= threads <= MOST_THREADS:
            raise UsageError(f"the record says {threads} threads, 1 to {MOST_THREADS} are allowed")
    set_threads(threads)
    section = request.profile.target
    target = load_target(section.kind, request.profile.model.folder(), section.options)
    console = Console()
    with _progress(console) as progress:
        folder, record = run(
            request,
            target,
            options.out,
            resume=options.resume,
            progress=progress,
            # A target that is elsewhere is asked from one process.
            executor=LocalProcesses(1 if isinstance(target, Keeping) else options.workers or default_workers()),
        )
    page = write_reports(folder, record)
    terminal.show(record, page, console)
    return record


def render_again(run: str, out: Path) -> None:
    """Write the reports of a run from its record; `run` is an id in `out`, or the path of a run's folder.

    Raises:
        UsageError: no such run, or its record cannot be read.
    """
    path = Path(run) if os.sep in run else out / run
    folder = RunFolder.find(path.parent, path.name)
    record = folder.read_record()
    terminal.show(record, write_reports(folder, record), Console())


def _progress(console: Console) -> AbstractContextManager[Progress]:
    if console.is_terminal:
        return Live(console)
    return nullcontext(Lines(console))


def _request(options: RunOptions, earlier: RunRecord | None) -> Request:
    """What to judge. When a run is resumed, what the user does not say is taken from its record."""
    name, profile = _profile(options, earlier)
    if earlier is None:
        profile = with_replays(profile, options.out)
    if options.sanitize:
        profile = _with_sanitizers(name, profile)
    selected: tuple[str, ...] | None = options.gates or None
    faults = options.faults
    seed = options.seed
    if earlier is not None:
        if selected is None and earlier.stable.selected is not None:
            selected = tuple(earlier.stable.selected)
        faults = faults or tuple(fault.id for fault in earlier.stable.faults)
        seed = earlier.stable.seed if seed is None else seed
    keep_going = options.keep_going or (earlier is not None and earlier.stable.keep_going)
    return Request(
        profile_name=name,
        profile=profile,
        gates=gates_named(name, profile, selected),
        selected=selected,
        seed=seed or 0,
        faults=faults_named(faults),
        keep_going=keep_going,
        bisect=options.bisect,
        command=options.command or _command(options),
    )


def _profile(options: RunOptions, earlier: RunRecord | None) -> tuple[str, Profile]:
    if options.profile is None and earlier is not None:
        recorded = earlier.stable.profile
        name, profile = recorded.name, profile_from(recorded.content, f"profile of run {earlier.run.id}")
    else:
        name, profile = load_profile(DEFAULT_PROFILE if options.profile is None else options.profile)
        profile = options.given or profile
    if options.model is not None:
        # A folder that is called like the embedded model is still a folder.
        path = f"./{options.model}" if str(options.model) == EMBEDDED else str(options.model)
        profile = profile.model_copy(update={"model": ModelSection(path=path)})
    return name, profile


def _with_sanitizers(name: str, profile: Profile) -> Profile:
    if "sync" not in profile.gates:
        raise UsageError(f"--sanitize is for gate sync, and profile {name!r} has no [gates.sync] table")
    settings = {**profile.gates["sync"], "sanitize": 1}
    return profile.model_copy(update={"gates": {**profile.gates, "sync": settings}})


def gates_named(name: str, profile: Profile, selected: tuple[str, ...] | None) -> list[Gate]:
    """The profile's gates, or those selected.

    Raises:
        UsageError: a selected gate does not exist, or the profile has no table for it.
    """
    for gate in selected or ():
        if gate not in profile.gates:
            load_gate(gate)
            known = ", ".join(profile.gates)
            raise UsageError(f"profile {name!r} has no [gates.{gate}] table; its gates: {known}")
    return [load_gate(gate) for gate in profile.gates if selected is None or gate in selected]


def faults_named(ids: tuple[str, ...]) -> tuple[Fault, ...]:
    """Faults of the catalogue by id.

    Raises:
        UsageError: no fault is called so.
    """
    if not ids:
        return ()
    catalogue = load_faults()
    unknown = [fault for fault in ids if fault not in catalogue]
    if unknown:
        raise UsageError(f"no fault is called {unknown[0]!r}; decodegate faults lists all {len(catalogue)}")
    return tuple(catalogue[fault] for fault in ids)


def _command(options: RunOptions) -> tuple[str, ...]:
    """The command that asks the same question, with the defaults that matter spelt out."""
    words = ["decodegate", "run", "--profile", options.profile or DEFAULT_PROFILE]
    for gate in options.gates:
        words += ["--gate", gate]
    if options.model is not None:
        words += ["--model", str(options.model)]
    for fault in options.faults:
        words += ["--fault", fault]
    words += ["--seed", str(options.seed or 0)]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.keep_going:
        words.append("--keep-going")
    if options.sanitize:
        words.append("--sanitize")
    return tuple(words)
