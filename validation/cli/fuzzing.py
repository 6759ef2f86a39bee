"""`decodegate fuzz`: schedules drawn at random, against the solo runs of their requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import options
from validation.cli.printing import say

if TYPE_CHECKING:
    from validation.fuzz.search import Searched
    from validation.fuzz.work import Work

LEAST_OPERATIONS = 12
"""A failing case must shrink to so many operations at most, or nobody will read it."""


def fuzz(
    steps: Annotated[int, typer.Option("--steps", min=1, max=10**9, help="Engine steps of every search.")] = 2000,
    seed: options.SeedOption = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=10_000, help="Searches, each from its own seed.")] = 1,
    fault: options.FaultOption = None,
    all_faults: Annotated[
        bool, typer.Option("--all-faults", help="One search for every fault that schedules have to show.")
    ] = False,
    model: options.ModelOption = None,
    whole_model: Annotated[
        bool, typer.Option("--whole-model", help="The model itself with real text, not the engine's miniature.")
    ] = False,
    workers: options.WorkersOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Play random schedules on the candidate's engine: every request must see what it sees alone.

    Arrivals, chunked and one-token prompts, batches that grow and shrink, preemption, aborts, slots and pages used
    again, prefixes that hit, hit in part and miss, drafts right and wrong. What fails is shrunk and kept as
    OUT/fuzz/NAME.json, for decodegate replay.

    [bold]Examples[/bold]

    decodegate fuzz                                    2,000 steps; a minute
    decodegate fuzz --steps 6250 --seeds 16            100,000 steps in 16 searches
    decodegate fuzz --fault spec-column-zero           the case that shows a fault
    decodegate fuzz --all-faults                       every fault of the scheduler and its caches; many minutes
    decodegate fuzz --whole-model --steps 200          k3-mini in place of the miniature

    [bold]Exit codes[/bold]

    0 nothing failed, or every fault asked for was found in at most 12 operations; 1 otherwise;
    2 wrong usage or bad input
    """
    from validation.errors import UsageError
    from validation.fuzz.files import Subject, fault_named
    from validation.fuzz.work import Work, scheduling_faults, searched
    from validation.loading import load_faults
    from validation.run.environment import default_workers, set_threads

    if model is not None and not whole_model:
        raise UsageError("--model is fuzzed with --whole-model only; the miniature is always the same")
    set_threads(1)
    first = seed or 0
    subject = Subject(not whole_model, model, seed=first)
    names = [fault_named(name).id for name in dict.fromkeys(fault or ())]
    names += [one.id for one in scheduling_faults(list(load_faults().values())) if all_faults and one.id not in names]
    asked = [Subject(subject.small, model, faults=(name,), seed=first) for name in names] or [subject]
    works = [Work(one, first + number, steps) for one in asked for number in range(seeds)]
    missed = 0
    for work, outcome in searched(works, workers or default_workers()):
        shown = _told(work, outcome, out / "fuzz")
        missed += shown != bool(names)
    ran = f"{len(works)} searches of {steps} steps"
    good = f"{len(works) - missed} found in at most {LEAST_OPERATIONS} operations" if names else f"{missed} failed"
    say(f"{ran}: {good}")
    return 1 if missed else 0


def _told(work: Work, outcome: Searched, folder: Path) -> bool:
    """Print a search's line and keep its failure. Returns whether one was found, a fault's in few operations."""
    from validation.fuzz.files import write_failure

    faults = "-".join(work.subject.faults)
    what = " ".join(filter(None, (faults, f"seed {work.seed}")))
    failure = outcome.failure
    if failure is None:
        say(f"{what}: {outcome.steps} steps in {outcome.cases} cases, none fails")
        return False
    path = folder / f"{faults or 'candidate'}-{work.seed}.json"
    write_failure(path, work.subject, failure)
    operations = len(failure.case.operations)
    say(f"{what}: fails after {failure.found_after} steps; {operations} operations are enough: {failure.findings[0]}")
    say(f"  decodegate replay {path}")
    return operations <= LEAST_OPERATIONS or not faults


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fuzz)
