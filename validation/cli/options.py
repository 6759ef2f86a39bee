"""The options of the command line, one definition per concept, so that every command spells it the same way."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """Who reads standard output."""

    TEXT = "text"
    GITHUB = "github"


MOST_THREADS = 256
"""More threads than any machine of ours has cores; the threading library aborts on absurd numbers."""

_WHAT = "What is judged"
_HOW = "How it runs"
_OUTPUT = "What comes out"

ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Profile by name, or the path of a .toml file. Default: premerge.",
        rich_help_panel=_WHAT,
    ),
]
GateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="NAME",
        help="Run only this gate of the profile, and require it. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Folder of a checkpoint. Default: the profile's, usually the embedded model.",
        rich_help_panel=_WHAT,
    ),
]
FaultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="ID",
        help="Break the candidate with this fault of the catalogue. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=2**63 - 1,
        metavar="N",
        help="Seed of every draw. Default: 0.",
        rich_help_panel=_HOW,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=MOST_THREADS,
        metavar="N",
        help="Torch threads of each process; bits may depend on it. Default: 1.",
        rich_help_panel=_HOW,
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Processes that measure; results do not depend on it. Default: one a core, at most 4.",
        rich_help_panel=_HOW,
    ),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="ID",
        help="Finish an earlier run: only what is unfinished is measured.",
        rich_help_panel=_HOW,
    ),
]
KeepGoingOption = Annotated[
    bool,
    typer.Option(
        "--keep-going",
        help="Run the costlier layers even when a cheaper one failed.",
        rich_help_panel=_HOW,
    ),
]
SanitizeOption = Annotated[
    bool,
    typer.Option(
        "--sanitize",
        help="In gate sync, run the kernels under compute-sanitizer too.",
        rich_help_panel=_HOW,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Folder of run folders.", rich_help_panel=_OUTPUT),
]
FormatOption = Annotated[
    OutputFormat,
    typer.Option(
        "--format",
        help="github adds annotations and fills the job's summary page.",
        rich_help_panel=_OUTPUT,
    ),
]
BisectOption = Annotated[
    bool,
    typer.Option(
        "--bisect-exit",
        help="For git bisect run: 125 (skip) instead of 3 or 4, 129 (stop) instead of 2.",
        rich_help_panel=_OUTPUT,
    ),
]
MarkdownOption = Annotated[
    bool,
    typer.Option("--markdown", help="Print the page docs/faults.md instead.", rich_help_panel=_OUTPUT),
]
FirstOption = Annotated[
    bool,
    typer.Option(
        "--stop-at-first",
        help="Do not ask costlier gates about a fault that a cheaper one caught.",
        rich_help_panel=_HOW,
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of a run in the folder of runs, or the run's own folder.")
]
