"""`decodegate history baseline`: the one thing that moves a baseline."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import options
from validation.cli.printing import say
from validation.errors import UsageError

if TYPE_CHECKING:
    from validation.history.store import History

app = typer.Typer(name="baseline", rich_markup_mode="rich")

DbOption = Annotated[
    Path | None,
    typer.Option("--db", metavar="FILE", help="The history's SQLite file. Default: history.sqlite3 in --out."),
]


@app.callback()
def baseline() -> None:
    """Set or show the baseline of each series. It moves only when told.

    [bold]Example[/bold]

    decodegate history baseline set 20260102-030405-abcdef

    [bold]Exit codes[/bold]

    0 done, 2 wrong usage or bad input
    """


@app.command("set")
def set_baseline(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of the history that passed.")],
    db: DbOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Make a run the baseline of its series. Nothing else moves a baseline.

    [bold]Example[/bold]

    decodegate history baseline set 20260102-030405-abcdef

    [bold]Exit codes[/bold]

    0 set, 2 no such run, or it did not pass
    """
    with open_history(db, out) as history:
        history.set_baseline(run, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    say(f"baseline: {run}")
    return 0


@app.command("show")
def show_baselines(db: DbOption = None, out: options.OutOption = Path("runs")) -> int:
    """List the baselines.

    [bold]Example[/bold]

    decodegate history baseline show

    [bold]Exit codes[/bold]

    0 listed, 2 wrong usage or bad input
    """
    with open_history(db, out) as history:
        for series, (run, since) in history.baselines().items():
            say(f"series {series[:8]}: {run}, set {since}")
    return 0


def open_history(db: Path | None, out: Path, new: bool = False) -> History:
    """The history at `db`, or the one in the folder of runs; only with `new` may it be made.

    Raises:
        UsageError: there is none.
    """
    from validation.history.store import History

    path = db or out / "history.sqlite3"
    if not new and not path.exists():
        raise UsageError(f"there is no history {str(path)!r}; decodegate history add makes one, --db names another")
    return History(path)
