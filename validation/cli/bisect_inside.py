"""From options to a bisection inside the model: the question is put together, the search runs, files are written."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from validation.bisect.kernels import Found, KernelsDoc, Search, confirm, document
from validation.bisect.places import NEEDS
from validation.bisect.question import Cell, ParityQuestion
from validation.cli.lines import say
from validation.errors import UsageError, one_line
from validation.faults.base import Fault, in_layer
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.loading import load_faults
from validation.profile import DEFAULT_PROFILE, EMBEDDED, load_profile
from validation.records.jsonio import pretty
from validation.records.storage import RunFolder, new_run_id
from validation.run.environment import set_threads
from validation.run.version import code_version
from validation.targets.base import Capability
from validation.targets.registry import load_target
from validation.verdict import Verdict, exit_code

KERNELS_FILE = "kernels.json"


@dataclass(frozen=True)
class InsideOptions:
    """The options that every bisection inside a model has; None where the user said nothing."""

    profile: str | None
    model: Path | None
    faults: tuple[str, ...]
    cell: Cell
    seed: int
    threads: int | None
    out: Path


def bisect_kernels(options: InsideOptions, most: int) -> int:
    """Search, write the replay file, print what was found, and return the exit code.

    Raises:
        UsageError: something in the options cannot be.
    """
    question = question_of(options, NEEDS)
    console = Console()
    search = Search(question, most, lambda line: say(console, line))
    folder = RunFolder.create(options.out, new_run_id(datetime.now(UTC)))
    found = search.find()
    name, model = options.profile or DEFAULT_PROFILE, model_name(options)
    doc = document(found, question, name, model, code_version())
    folder.write(pretty(doc.model_dump(mode="json")), KERNELS_FILE)
    _tell(console, found, folder)
    return exit_code(found.verdict)


def replay_kernels(path: Path, threads: int | None) -> int:
    """Ask again what a replay file says, and return the exit code.

    Raises:
        UsageError: the file cannot be read, or the model or the profile is no longer what it was.
    """
    doc = read_replay(path)
    cell = Cell(doc.cell.name, doc.cell.sequences, doc.cell.prompt, doc.cell.decode)
    model = None if doc.model == EMBEDDED else Path(doc.model)
    options = InsideOptions(doc.profile, model, tuple(doc.faults), cell, doc.seed, threads, Path("runs"))
    question = question_of(options, NEEDS)
    now = dict(question.target.fingerprint())
    changed = sorted(key for key in {*now, *doc.fingerprint} if now.get(key) != doc.fingerprint.get(key))
    if changed:
        raise UsageError(f"{str(path)!r} was made of another target: {', '.join(changed)} differ; bisect anew")
    console = Console()
    search = Search(question, len(doc.sets) + 3, lambda line: say(console, line))
    places = [(place.op, place.layer) for place in doc.places]
    if list(search.places) != places:
        raise UsageError(f"{str(path)!r}: the candidate now runs other ops of its own than then; bisect anew")
    verdict, summary = confirm(search, [[places[i] for i in one] for one in doc.sets])
    say(console, f"{verdict}: {summary}")
    return exit_code(verdict)


def read_replay(path: Path) -> KernelsDoc:
    """The replay file at `path`.

    Raises:
        UsageError: it cannot be read, is no replay file of this version, or names places that it does not list.
    """
    try:
        doc = KernelsDoc.model_validate_json(read_limited(path, LARGEST_TEXT_FILE, "replay file"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{str(path)!r} is not a replay file: {where}: {one_line(first['msg'])}") from error
    if any(not 0 <= i < len(doc.places) for one in doc.sets for i in one):
        raise UsageError(f"{str(path)!r} is not a replay file: a set names a place that is not listed")
    if not doc.sets:
        raise UsageError(f"{str(path)!r} names no failing set ({one_line(doc.summary)}); there is nothing to replay")
    return doc


def question_of(options: InsideOptions, needs: frozenset[Capability]) -> ParityQuestion:
    """The arms of the profile on its target, with the faults asked for.

    Raises:
        UsageError: something in the options cannot be, or the target lacks a capability.
    """
    _, profile = load_profile(options.profile or DEFAULT_PROFILE)
    faults = tuple(_fault(name) for name in options.faults)
    set_threads(options.threads)
    target = load_target(profile.target.kind, options.model or profile.model.folder())
    lacking = sorted(need.value for need in needs - target.capabilities)
    if lacking:
        raise UsageError(f"target {target.name!r} cannot {', '.join(lacking)}, which a bisection needs")
    candidate = replace(profile.candidate.arm("candidate"), faults=faults)
    return ParityQuestion(target, profile.baseline.arm("baseline"), candidate, options.cell, options.seed)


def model_name(options: InsideOptions) -> str:
    """The model as a replay file names it: an absolute folder, or the embedded one."""
    if options.model is not None:
        return str(options.model.resolve())
    folder = load_profile(options.profile or DEFAULT_PROFILE)[1].model.folder()
    return EMBEDDED if folder is None else str(folder.resolve())


def _fault(name: str) -> Fault:
    known, (fault_id, _, layer) = load_faults(), name.partition("@")
    if fault_id not in known:
        raise UsageError(f"no fault is called {fault_id!r}; decodegate faults lists all {len(known)}")
    if "@" in name and not (layer.isascii() and layer.isdigit() and len(layer) < 5):
        raise UsageError(f"--fault {name}: {layer!r} is not a layer; write {fault_id}@3 for layer 3")
    return in_layer(known[fault_id], int(layer)) if layer else known[fault_id]


def _tell(console: Console, found: Found, folder: RunFolder) -> None:
    say(console, f"{found.verdict}: {found.summary}")
    file = folder.file(KERNELS_FILE)
    if found.verdict is Verdict.FAIL:
        say(console, f"again: {shlex.join(['decodegate', 'bisect', 'kernels', '--replay', str(file)])}")
    else:
        say(console, str(file))
