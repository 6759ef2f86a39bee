"""The commands `decodegate bisect ...`: which op, which layer, which token, which commit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from validation.cli import options

app = typer.Typer(
    name="bisect",
    help="Find the cause of a failure: the op, the layer, the token, the commit.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

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
    from validation.bisect.question import Cell
    from validation.cli import bisect_inside as inside

    if replay is not None:
        return inside.replay_kernels(replay, threads)
    chosen = inside.InsideOptions(
        profile=profile,
        model=model,
        faults=tuple(dict.fromkeys(fault or ())),
        cell=Cell(cell, sequences, prompt, decode),
        seed=seed or 0,
        threads=threads,
        out=out,
    )
    return inside.bisect_kernels(chosen, most_runs)
