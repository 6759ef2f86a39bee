"""`decodegate history`: runs over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import baselines, options
from validation.cli.baselines import DbOption, open_history
from validation.cli.printing import rows, say
from validation.cli.signing import run_folder
from validation.errors import UsageError

if TYPE_CHECKING:
    from validation.history.entry import Entry
    from validation.history.trend import Course

app = typer.Typer(name="history", rich_markup_mode="rich")
app.add_typer(baselines.app)

_STEP = 1
_MOST_ROWS = 40

ProfileFilter = Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Only runs of this profile.")]


@app.callback()
def history() -> None:
    """Keep runs over time: follow their figures, find where a level stepped, compare two runs, and set a baseline.

    [bold]Examples[/bold]

    decodegate history add runs/*-*-*
    decodegate history trend
    decodegate history baseline set 20260102-030405-abcdef

    [bold]Exit codes[/bold]

    0 done, 1 a step since the baseline (trend --check), 2 wrong usage or bad input
    """


@app.command()
def add(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs, or their folders; old ones too.")],
    db: DbOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Keep runs in the history. A run that is there already is left as it is; several processes may add at once.

    [bold]Examples[/bold]

    decodegate history add 20260102-030405-abcdef
    decodegate history add runs/*-*-*               import everything; what cannot be read is named

    [bold]Exit codes[/bold]

    0 all kept, 2 wrong usage, or a record that cannot be read (the others are kept)
    """
    from validation.history.entry import entry_of

    entries, problems = [], []
    for run in runs:
        try:
            entries.append(entry_of(run_folder(run, out)))
        except UsageError as error:
            problems.append(str(error))
    if entries:
        with open_history(db, out, new=True) as history:
            new = history.add(entries)
        say(f"{len(new)} added, {len(entries) - len(new)} there already")
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UsageError(f"{problems[0]}{more}")
    return 0


@app.command("list")
def list_runs(profile: ProfileFilter = None, db: DbOption = None, out: options.OutOption = Path("runs")) -> int:
    """List the runs, oldest first, with verdict, commit and series; * marks a baseline.

    [bold]Example[/bold]

    decodegate history list --profile nightly

    [bold]Exit codes[/bold]

    0 listed, 2 wrong usage or bad input
    """
    with open_history(db, out) as history:
        entries, baselines = history.entries(profile), {run for run, _ in history.baselines().values()}
    cells = []
    for entry in entries:
        mark = "*" if entry.id in baselines else ""
        verdict = f"{entry.verdict} (faults put in)" if entry.faults else entry.verdict
        commit = str(entry.about["run"]["commit"] or "unknown")[:12]
        cells.append((entry.id + mark, entry.created, entry.profile, verdict, commit, entry.series[:8]))
    rows(("run", "created", "profile", "verdict", "commit", "series"), cells)
    return 0


@app.command()
def trend(
    profile: ProfileFilter = None,
    gate: Annotated[str | None, typer.Option("--gate", metavar="NAME", help="Only this gate.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="PATTERN", help="Figures that fit, * being anything: every value.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 when a figure stepped after the baseline.")
    ] = False,
    db: DbOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Follow every figure of every gate over the runs of each series, and say where its level stepped.

    [bold]Examples[/bold]

    decodegate history trend
    decodegate history trend --gate parity --metric 'cells.*.typical_ratio.mean'
    decodegate history trend --check                 for CI: 1 when something stepped since the baseline

    [bold]Exit codes[/bold]

    0 shown, 1 a step since the baseline (--check), 2 wrong usage or bad input, or no run to check
    """
    from validation.history.trend import by_series, courses, since

    stepped, figures = False, 0
    with open_history(db, out) as history:
        baselines = history.baselines()
        found_series = by_series(history.entries(profile))
        if check and not found_series:
            raise UsageError("there is no run to check; decodegate history add keeps some")
        for series, runs in found_series.items():
            base = baselines.get(series, (None, ""))[0]
            reference = history.entry(base) if base else None
            found = courses(runs, reference, gate, metric)
            figures += len(found)
            verdicts = ", ".join(f"{sum(r.verdict == v for r in runs)} {v}" for v in sorted({r.verdict for r in runs}))
            say(f"series {series[:8]}: {runs[0].profile}, {len(runs)} runs ({verdicts}), baseline {base or 'none'}")
            late = [course for course in found if since(course, base)]
            stepped |= bool(late)
            _courses([course for course in found if course.steps or metric is not None], base)
            if not any(course.steps for course in found):
                say(f"  no step in {len(found)} figures")
    if found_series and not figures:
        asked = " ".join(f"{name} {value!r}" for name, value in (("--gate", gate), ("--metric", metric)) if value)
        raise UsageError(f"no run has a figure for {asked or 'a trend'}; decodegate history trend shows what there is")
    return _STEP if check and stepped else 0


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run: id in the history, or folder.")],
    second: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another run. Without it A is compared with its baseline.")
    ] = None,
    db: DbOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Two runs side by side: what they depend on, what each gate said, and the figures that differ most.

    [bold]Examples[/bold]

    decodegate history compare 20260102-030405-abcdef 20260103-030405-fedcba
    decodegate history compare 20260103-030405-fedcba      with the baseline of its series

    [bold]Exit codes[/bold]

    0 shown, 2 wrong usage or bad input
    """
    from validation.history.side_by_side import context_rows, figure_rows, gate_rows

    a, b = _pair(first, second, db, out)
    series = context_rows(a, b, "series")
    if series:
        say("These runs are of different series: their figures differ for these reasons too.")
        rows(("what they judge", a.id, b.id), series)
    rows(("how they ran", a.id, b.id), context_rows(a, b, "run"))
    rows(("gate", a.id, b.id), gate_rows(a, b))
    figures = figure_rows(a, b)
    shown = [(name, f"{x:.6g}", f"{y:.6g}", f"{change:+.2%}") for name, x, y, change in figures[:_MOST_ROWS]]
    rows(("figure", a.id, b.id, "change"), shown)
    say(
        f"{len(figures)} figures differ"
        + (f", the {_MOST_ROWS} largest are shown" if len(figures) > _MOST_ROWS else "")
    )
    return 0


def _pair(first: str, second: str | None, db: Path | None, out: Path) -> tuple[Entry, Entry]:
    """The two runs, from their folders where there are such, else from the history; a baseline comes first."""
    from validation.history.entry import entry_of

    def found(run: str) -> Entry:
        path = Path(run) if "/" in run else out / run
        if path.is_dir():
            return entry_of(run_folder(run, out))
        with open_history(db, out) as history:
            return history.entry(run)

    a = found(first)
    if second is not None:
        return a, found(second)
    with open_history(db, out) as history:
        base = history.baselines().get(a.series)
        if base is None:
            raise UsageError(f"the series of run {a.id!r} has no baseline; name a second run, or set one")
        return history.entry(base[0]), a


def _courses(found: list[Course], base: str | None) -> None:
    from validation.history.trend import since

    for course in found:
        change = f", {course.change:+.2%} of the baseline's" if course.change is not None else ""
        say(f"  {course.gate} {course.name}: n = {len(course.values)}, last {course.values[-1]:.6g}{change}")
        late = since(course, base)
        for step in course.steps:
            when = "since the baseline" if base and step in late else "step"
            say(f"    {when}, at {course.runs[step.index]}: {step.before:.6g} to {step.after:.6g} (p = {step.p:.2g})")
