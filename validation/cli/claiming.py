"""`decodegate claims`: the published figures, and what may be compared with what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from validation.cli.printing import say

app = typer.Typer(name="claims", rich_markup_mode="rich")

_NOT_COMPARABLE = 1

FileOption = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Figures of your own: a file like those in validation/claims/."),
]


@app.callback(invoke_without_command=True)
def claims(context: typer.Context, file: FileOption = None) -> int:
    """Show the published speed figures of specialised decode, and what each may be compared with.

    [bold]Examples[/bold]

    decodegate claims
    decodegate claims compare C1.specialised C1.generic
    decodegate claims compare C1 C4                      refused, and why

    [bold]Exit codes[/bold]

    0 shown, 2 wrong usage or bad input
    """
    context.obj = file
    if context.invoked_subcommand is None:
        _show(file)
    return 0


@app.command()
def compare(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="A", help="A figure: C1.specialised, or C1.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another figure.")],
    file: FileOption = None,
) -> int:
    """Form the ratio of two figures, or say everything that stands in its way.

    [bold]Examples[/bold]

    decodegate claims compare C1.specialised C1.generic  1.73 times
    decodegate claims compare C5.specialised C5.generic  refused: 16 GPUs and 8
    decodegate claims compare C1 MINE --file mine.toml   a measurement of your own

    [bold]Exit codes[/bold]

    0 a ratio, 1 not comparable, 2 wrong usage or bad input
    """
    from validation.claims.compare import ratio, refusal
    from validation.claims.model import figures, find, published

    known = figures(published(file or context.obj))
    a, b = find(known, first), find(known, second)
    problems = refusal(a, b)
    if problems:
        say(f"no ratio of {a.name} and {b.name}:")
        for problem in problems:
            say(f"  {problem}")
        return _NOT_COMPARABLE
    say(f"{a.name} is {ratio(a, b):.2f} times as good as {b.name}: {a.value:g} and {b.value:g} {a.unit}, {a.metric}")
    say(f"  as published in {a.source}; not reproduced here")
    return 0


def _show(file: Path | None) -> None:
    from validation.claims.compare import comparable, refusal, stated
    from validation.claims.model import figures, published

    files = published(file)
    known = figures(files)
    for source in files:
        for claim in source.claims:
            ratio = f", {claim.ratio:g} times in the source's words" if claim.ratio is not None else ""
            say(f"{claim.id}: {claim.metric}{ratio} ({source.sources[claim.source]})")
            say(f"  {claim.reads_as}")
            mine = [figure for figure in known if figure.claim == claim.id]
            for figure in mine:
                say(f"  {figure.name}: {figure.value:g} {figure.unit}; {stated(figure.conditions)}")
                partners = comparable(figure, known)
                if partners:
                    say(f"    may be compared with {', '.join(partner.name for partner in partners)}")
                    continue
                own = [other for other in mine if other.name != figure.name]
                reason = "; ".join(refusal(figure, own[0])) if own else "its counterpart was not published"
                say(f"    may be compared with nothing published: {reason}")
        if source.scope:
            say(source.scope)
    say("A measurement of your own may be compared with a figure only where every condition agrees and is known.")
