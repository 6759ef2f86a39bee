"""The command `decodegate bisect commits`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from validation.cli import options


class MethodName(StrEnum):
    """How commits are chosen."""

    AUTO = "auto"
    PLAIN = "plain"
    BAYES = "bayes"


_COMMITS, _RUNS = "Which commits", "How they are judged"


def commits(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND | GATE OPTIONS", help="What judges a commit.")
    ] = None,
    good: Annotated[
        str | None, typer.Option("--good", metavar="COMMIT", help="It passes.", rich_help_panel=_COMMITS)
    ] = None,
    bad: Annotated[
        str | None, typer.Option("--bad", metavar="COMMIT", help="It fails.", rich_help_panel=_COMMITS)
    ] = None,
    repo: Annotated[
        Path, typer.Option("--repo", metavar="PATH", help="A git repository.", rich_help_panel=_COMMITS)
    ] = Path("."),
    method: Annotated[
        MethodName,
        typer.Option(
            "--method",
            help="plain: git bisect. bayes: for noisy verdicts. auto: bayes where a noisy gate is named.",
            rich_help_panel=_RUNS,
        ),
    ] = MethodName.AUTO,
    build: Annotated[
        str | None,
        typer.Option(
            "--build",
            metavar="COMMAND",
            help="Builds a commit before it is judged; split into words, run without a shell. Fails: skipped.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    keep_ignored: Annotated[
        bool,
        typer.Option(
            "--keep-ignored", help="Leave ignored files (build outputs) from commit to commit.", rich_help_panel=_RUNS
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.001, metavar="SECONDS", help="A longer run is inconclusive.", rich_help_panel=_RUNS
        ),
    ] = None,
    posterior: Annotated[
        float,
        typer.Option(
            "--posterior", min=0.501, max=0.999999, metavar="P", help="bayes: stop there.", rich_help_panel=_RUNS
        ),
    ] = 0.99,
    wrong: Annotated[
        float | None,
        typer.Option(
            "--wrong",
            min=0,
            max=0.49,
            metavar="SHARE",
            help="bayes: share of wrong verdicts, if known. Default: about a quarter, and learnt.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    most_runs: Annotated[
        int | None,
        typer.Option(
            "--most-runs",
            min=2,
            metavar="N",
            help="Stop after so many, 400 unless told; --resume with more goes on.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="ID", help="Go on with an earlier one.", rich_help_panel=_RUNS),
    ] = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Find the commit that broke it, in a worktree of its own: your tree, index and refs are never touched.

    The command's exit code judges, as for git bisect run: 0 good, 125 to 127 cannot be judged, 128 and above stop,
    all others bad.

    [bold]Examples[/bold]

    decodegate bisect commits --good v1.0 --bad HEAD -- --profile smoke --gate parity
    decodegate bisect commits --good v1.0 --bad HEAD -- --gate stability         noisy: Bayesian
    decodegate bisect commits --good A --bad B --repo ../vllm --build "uv pip install -e ." -- ./judge.sh
    decodegate bisect commits --resume 20260102-030405-abcdef                    after a kill, too

    [bold]Exit codes[/bold]

    0 nothing to bisect: --bad passes, or as often as --good; 1 found; 2 wrong usage, or the command said stop;
    3 inconclusive: --good fails, only commits are left that cannot be judged, the runs were spent;
    4 error of the machinery; 130 interrupted
    """
    from validation.cli.bisect_commits import CommitOptions, bisect_commits

    return bisect_commits(
        CommitOptions(
            good=good,
            bad=bad,
            repo=repo,
            words=tuple(command or ()),
            method=method.value,
            build=build,
            keep_ignored=keep_ignored,
            timeout=timeout,
            posterior=posterior,
            wrong=wrong,
            most_runs=most_runs,
            resume=resume,
            out=out,
        )
    )
