"""The commands `decodegate bisect ...`: which op, which layer, which token, which commit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import options
from validation.cli.bisecting_commits import commits
from validation.verdict import EXIT_USAGE

if TYPE_CHECKING:
    from validation.cli.bisect_inside import InsideOptions

app = typer.Typer(name="bisect", rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def bisect(context: typer.Context) -> None:
    """Find the cause of a failure: the op, the layer, the token, the commit.

    [bold]Examples[/bold]

    decodegate bisect kernels --cell fp8-tp1-b8                     which op carries the failure of this cell
    decodegate bisect layers                                        the first layer that leaves the noise floor
    decodegate bisect commits --good A --bad B -- --gate parity     which commit

    [bold]Exit codes[/bold]

    0 nothing to bisect, 1 the cause is named, 2 wrong usage or bad input, 3 inconclusive, 4 error, 130 interrupted
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


app.command()(commits)

_WHAT = "What is measured"

CellOption = Annotated[
    str,
    typer.Option(
        "--cell",
        metavar="NAME",
        help="Cell of the parity gate, as its findings name it: format-ranks-batch.",
        rich_help_panel=_WHAT,
    ),
]
SequencesOption = Annotated[
    int, typer.Option("--sequences", min=2, max=10_000, metavar="N", help="Texts.", rich_help_panel=_WHAT)
]
PromptOption = Annotated[
    int, typer.Option("--prompt", min=1, metavar="N", help="Tokens of a prompt.", rich_help_panel=_WHAT)
]
DecodeOption = Annotated[
    int, typer.Option("--decode", min=1, metavar="N", help="Tokens decoded after it.", rich_help_panel=_WHAT)
]
LayerFaultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="ID[@LAYER]",
        help="Break the candidate with this fault, in one layer or in all, to see it found. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]


@app.command()
def kernels(
    profile: options.ProfileOption = None,
    model: options.ModelOption = None,
    fault: LayerFaultOption = None,
    cell: CellOption = "fp8-tp1-b8",
    sequences: SequencesOption = 8,
    prompt: PromptOption = 32,
    decode: DecodeOption = 12,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    most_runs: Annotated[int, typer.Option("--most-runs", min=2, metavar="N", help="Stop after so many.")] = 200,
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Ask again what this replay file says.")
    ] = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Find the ops, and their layers, that carry a parity failure: the baseline's ops are put in their places.

    [bold]Examples[/bold]

    decodegate bisect kernels                                     the embedded model; healthy
    decodegate bisect kernels --fault kda-delta-dropped@4         broken on purpose, to see it found
    decodegate bisect kernels --cell fp8-tp8-b4 --model ckpt      the cell that the parity gate named
    decodegate bisect kernels --replay runs/<id>/kernels.json     ask again

    [bold]Exit codes[/bold]

    0 healthy, nothing to bisect; 1 it fails, and the ops are named; 2 wrong usage or bad input;
    3 it is not shown to fail, or no op carries the failure, or the runs were spent; 4 error of the machinery
    """
    from validation.cli import bisect_inside as inside

    if replay is not None:
        return inside.replay_kernels(replay, threads)
    chosen = _inside(profile, model, fault, cell, (sequences, prompt, decode), seed, threads, out)
    return inside.bisect_kernels(chosen, most_runs)


def _inside(
    profile: str | None,
    model: Path | None,
    fault: list[str] | None,
    cell: str,
    lengths: tuple[int, int, int],
    seed: int | None,
    threads: int | None,
    out: Path,
) -> InsideOptions:
    from validation.bisect.question import Cell
    from validation.cli.bisect_inside import InsideOptions

    faults = tuple(dict.fromkeys(fault or ()))
    return InsideOptions(profile, model, faults, Cell(cell, *lengths), seed or 0, threads, out)


@app.command()
def layers(
    profile: options.ProfileOption = None,
    model: options.ModelOption = None,
    fault: LayerFaultOption = None,
    cell: CellOption = "fp8-tp1-b8",
    sequences: SequencesOption = 12,
    prompt: PromptOption = 32,
    decode: DecodeOption = 12,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Find the first layer in which the candidate's added error leaves the noise floor, and keep the tensors there.

    [bold]Examples[/bold]

    decodegate bisect layers                                      the embedded model; healthy
    decodegate bisect layers --fault moe-nibbles-swapped@6        broken on purpose, to see it found
    decodegate bisect layers --cell fp8-tp8-b4 --model ckpt       the cell that the parity gate named

    [bold]Exit codes[/bold]

    0 all of it stays within the floor; 1 the place is named; 2 wrong usage or bad input; 3 neither is shown; 4 error
    """
    from validation.cli.bisect_places import bisect_places

    lengths = (sequences, prompt, decode)
    return bisect_places(_inside(profile, model, fault, cell, lengths, seed, threads, out), "layers")


@app.command()
def tokens(
    profile: options.ProfileOption = None,
    model: options.ModelOption = None,
    fault: LayerFaultOption = None,
    cell: CellOption = "fp8-tp1-b8",
    sequences: SequencesOption = 12,
    prompt: PromptOption = 32,
    decode: DecodeOption = 12,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Find the first token at which the candidate's added error leaves the noise floor, and keep the tensors there.

    [bold]Examples[/bold]

    decodegate bisect tokens                                      the embedded model; healthy
    decodegate bisect tokens --fault kda-conv-not-written@2       broken on purpose, to see it found

    [bold]Exit codes[/bold]

    0 all of it stays within the floor; 1 the place is named; 2 wrong usage or bad input; 3 neither is shown; 4 error
    """
    from validation.cli.bisect_places import bisect_places

    lengths = (sequences, prompt, decode)
    return bisect_places(_inside(profile, model, fault, cell, lengths, seed, threads, out), "tokens")
