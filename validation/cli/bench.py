"""`decodegate bench`: the speed of both arms, in one process on the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from validation.cli import options

_WHAT, _LOAD, _HOW = "What is measured", "The load", "How it runs"

ShardOption = Annotated[
    int | None,
    typer.Option(
        "--shard",
        metavar="N",
        help="One rank's share of K3 at tensor parallelism N, random weights; CUDA only. Default: k3-mini.",
        rich_help_panel=_WHAT,
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option("--layers", metavar="N", help="Fewer layers than the shard has.", rich_help_panel=_WHAT),
]
BatchOption = Annotated[
    list[int] | None,
    typer.Option(
        "--batch", metavar="N", help="Requests of a step; may be repeated. Default: 1 2 .. 64.", rich_help_panel=_WHAT
    ),
]
DraftsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--drafts", metavar="N", help="Drafts of a verify step; may be repeated. Default: 3 5 7.", rich_help_panel=_WHAT
    ),
]
NoDraftsOption = Annotated[bool, typer.Option("--no-drafts", help="No verify steps.", rich_help_panel=_WHAT)]
ServeOption = Annotated[
    list[int] | None,
    typer.Option(
        "--serve",
        metavar="N",
        help="Requests that the engine serves at once; may be repeated. Default: 1 8 on CUDA, 1 4 on a CPU.",
        rich_help_panel=_WHAT,
    ),
]
NoServeOption = Annotated[bool, typer.Option("--no-serve", help="Steps only, no engine.", rich_help_panel=_WHAT)]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--against-compile",
        help="Also hold the generic arm to the same ops through torch.compile; minutes of compiling.",
        rich_help_panel=_WHAT,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context", min=1, metavar="N", help="Cached tokens a request. Default: 4096; 256.", rich_help_panel=_LOAD
    ),
]
PromptOption = Annotated[
    int | None,
    typer.Option("--prompt", min=1, metavar="N", help="Prompt tokens. Default: 64; 32.", rich_help_panel=_LOAD),
]
OutputOption = Annotated[
    int | None,
    typer.Option("--output", min=1, metavar="N", help="Answer tokens. Default: 32; 8.", rich_help_panel=_LOAD),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        min=1,
        max=1000,
        metavar="N",
        help="Most rounds A B B A a line. Default: 15; 3.",
        rich_help_panel=_HOW,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", min=1, metavar="S", help="Begin no line after so many seconds.", rich_help_panel=_HOW),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Folder of bench.json and bench.md.", rich_help_panel="What comes out"),
]


def bench(
    shard: ShardOption = None,
    layers: LayersOption = None,
    batch: BatchOption = None,
    drafts: DraftsOption = None,
    no_drafts: NoDraftsOption = False,
    serve: ServeOption = None,
    no_serve: NoServeOption = False,
    against_compile: CompileOption = False,
    context: ContextOption = None,
    prompt: PromptOption = None,
    output: OutputOption = None,
    rounds: RoundsOption = None,
    budget: BudgetOption = None,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    out: OutOption = Path("bench"),
) -> int:
    """Measure the generic and the specialised arm in turn: steps, verify steps, and what the engine's users wait for.

    It judges nothing. On a CPU the specialised arm is the emulation, whose speed says nothing about a GPU.

    [bold]Examples[/bold]

    decodegate bench                                  k3-mini, every batch
    decodegate bench --batch 1 --no-drafts --no-serve  one line in seconds
    decodegate bench --shard 16 --out h200            one rank's share of K3; 108 GB of weights
    decodegate bench --shard 16 --layers 13 --against-compile --batch 1 --batch 64 --no-drafts --no-serve

    [bold]Exit codes[/bold]

    0 all measured, 2 wrong usage or bad input, 3 the budget ended first, 4 a line failed, 130 interrupted
    """
    import torch
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from validation.bench.report import HEADER, cells, head
    from validation.bench.run import bench as measure
    from validation.bench.settings import BATCHES, DRAFTS, Settings
    from validation.cli.printing import say
    from validation.errors import UsageError
    from validation.run.environment import set_threads
    from validation.verdict import Verdict, exit_code

    if (no_drafts and drafts) or (no_serve and serve):
        raise UsageError("--no-drafts with --drafts, or --no-serve with --serve, is given; leave one of the two out")
    set_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings.on(
        device,
        shard=shard,
        layers=layers,
        batches=tuple(dict.fromkeys(batch or BATCHES)),
        drafts=() if no_drafts else tuple(dict.fromkeys(drafts or DRAFTS)),
        served=() if no_serve else tuple(dict.fromkeys(serve)) if serve else None,
        context=context,
        prompt=prompt,
        output=output,
        rounds=rounds,
        budget=budget,
        compiled=against_compile,
        seed=seed,
    )
    report = measure(
        settings, device, out, lambda line: say(f"{line.name} {line.requests or ''} {line.error or 'measured'}")
    )
    for sentence in head(report):
        say(sentence)
    table = Table(*HEADER, box=None, pad_edge=False)
    for line in report.lines:
        table.add_row(*map(Text, cells(line)))
    console = Console()
    (console if console.is_terminal else Console(width=240)).print(table)
    say(f"written to {out / 'bench.json'} and {out / 'bench.md'}")
    if any(line.error for line in report.lines):
        return exit_code(Verdict.ERROR)
    return exit_code(Verdict.INCONCLUSIVE) if report.unmeasured else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)
