"""The command `decodegate`. Commands are thin; what takes long to import is imported when a command needs it."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from validation.cli import (
    bench,
    bisecting,
    claiming,
    comparing,
    fitting,
    fuzzing,
    options,
    remembering,
    replaying,
    signing,
    soaking,
)
from validation.errors import MachineryError, RunInterrupted, UsageError, one_line
from validation.run.signals import terminated_as_interrupted
from validation.run.version import version
from validation.verdict import EXIT_USAGE, Verdict, exit_code

_EXIT_INTERRUPTED = 130
_EXIT_ABORT_BISECT = 129
"""`git bisect run` takes 2 for a bad commit and stops at 128 and above: a wrong command must stop it."""
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="decodegate", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(bisecting.app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Users see one line for their errors, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with terminated_as_interrupted():
            result = app(args=words, prog_name="decodegate", standalone_mode=False)
        sys.stdout.flush()
        return int(result or 0)
    except UsageError as error:
        return _refuse(str(error), words)
    except _CommandLineError as error:
        words_of = getattr(error, "format_message", error.__str__)
        return _refuse(f"{words_of().rstrip('.')}; see decodegate --help", words)
    except MachineryError as error:
        print(f"decodegate: {one_line(error)}", file=sys.stderr)
        return exit_code(Verdict.ERROR, bisect="--bisect-exit" in words)
    except RunInterrupted as error:
        print(f"decodegate: {error}", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        print("decodegate: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output has gone; nothing more can be said there, and the record is complete.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code(Verdict.ERROR, bisect="--bisect-exit" in words)
    except Exception:
        # Python's own exit code for a crash is 1, which would read as FAIL.
        traceback.print_exc()
        return exit_code(Verdict.ERROR, bisect="--bisect-exit" in words)


@app.callback(invoke_without_command=True)
def decodegate(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Is a specialised LLM decode path as correct as the generic one? decodegate answers with evidence.

    [bold]Start here[/bold]

    decodegate run                   judge the embedded model before a merge
    decodegate run --profile smoke   the same question in less depth
    decodegate gates                 what can be judged, and what it costs

    [bold]Exit codes[/bold]

    0 pass, 1 fail, 2 wrong usage or bad input, 3 inconclusive, 4 error of the machinery, 130 interrupted
    """
    if show_version:
        print(f"decodegate {version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command()
def run(
    profile: options.ProfileOption = None,
    gate: options.GateOption = None,
    model: options.ModelOption = None,
    fault: options.FaultOption = None,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    workers: options.WorkersOption = None,
    resume: options.ResumeOption = None,
    keep_going: options.KeepGoingOption = False,
    sanitize: options.SanitizeOption = False,
    out: options.OutOption = Path("runs"),
    output: options.FormatOption = options.OutputFormat.TEXT,
    bisect_exit: options.BisectOption = False,
) -> int:
    """Judge the candidate against the baseline and keep all evidence in one folder.

    [bold]Examples[/bold]

    decodegate run                                   profile premerge
    decodegate run --profile nightly --model ckpt    a checkpoint of your own
    decodegate run --gate numerics --seed 7          one gate, other draws
    decodegate run --resume 20260102-030405-abcdef   finish a stopped run
    git bisect run decodegate run --bisect-exit      find the commit at fault

    [bold]Exit codes[/bold]

    0 pass, 1 fail, 2 wrong usage or bad input, 3 inconclusive, 4 error of the machinery, 130 interrupted
    """
    from validation.cli.running import RunOptions, judge

    chosen = RunOptions(
        profile=profile,
        gates=tuple(dict.fromkeys(gate or ())),
        model=model,
        faults=tuple(dict.fromkeys(fault or ())),
        seed=seed,
        threads=threads,
        workers=workers,
        resume=resume,
        keep_going=keep_going,
        sanitize=sanitize,
        out=out,
        bisect=bisect_exit,
        github=output is options.OutputFormat.GITHUB,
    )
    return judge(chosen)


@app.command()
def mutate(
    profile: options.ProfileOption = None,
    gate: options.GateOption = None,
    model: options.ModelOption = None,
    fault: options.FaultOption = None,
    seed: options.SeedOption = None,
    threads: options.ThreadsOption = None,
    workers: options.WorkersOption = None,
    resume: options.ResumeOption = None,
    stop_at_first: options.FirstOption = False,
    out: options.OutOption = Path("runs"),
) -> int:
    """Put every fault of the catalogue into the candidate, ask the gates, and write the detection matrix.

    [bold]Examples[/bold]

    decodegate mutate                                   every fault, every gate; tens of minutes
    decodegate mutate --profile smoke                   one fault of every layer, below
    decodegate mutate --fault kda-delta-dropped         one fault
    decodegate mutate --resume 20260102-030405-abcdef   finish a stopped run as it was started

    [bold]Smoke[/bold]

    With --profile smoke, one fault of every layer that numerics, parity or sync sees is asked of the one unit that sees
    it: in two minutes it shows that the gates look at every layer, not how much of it they see.

    [bold]Exit codes[/bold]

    0 all caught, 1 some missed, 2 wrong usage or bad input, 4 red without a fault, 130 interrupted
    """
    from validation.cli.mutating import MutateOptions, measure_matrix

    chosen = MutateOptions(
        profile=profile,
        gates=tuple(dict.fromkeys(gate or ())),
        model=model,
        faults=tuple(dict.fromkeys(fault or ())),
        seed=seed,
        threads=threads,
        workers=workers,
        resume=resume,
        stop_at_first=stop_at_first,
        out=out,
    )
    return measure_matrix(chosen)


@app.command()
def report(run_id: options.RunArgument, out: options.OutOption = Path("runs")) -> int:
    """Write the reports of a run again from its record, and print its summary.

    [bold]Examples[/bold]

    decodegate report 20260102-030405-abcdef
    decodegate report downloads/20260102-030405-abcdef

    [bold]Exit codes[/bold]

    0 written, whatever the run's verdict; 2 no such run, or its record cannot be read
    """
    from validation.cli.running import render_again

    render_again(run_id, out)
    return 0


@app.command()
def gates() -> int:
    """List the gates: the question each one answers, what it needs, what it costs, which profiles use it.

    [bold]Example[/bold]

    decodegate gates

    [bold]Exit codes[/bold]

    0 listed, 2 a gate cannot be loaded here
    """
    from validation.cli.listing import show_gates

    show_gates()
    return 0


@app.command()
def faults(as_markdown: options.MarkdownOption = False) -> int:
    """List the catalogue of faults that can be put into the candidate to test the gates.

    [bold]Examples[/bold]

    decodegate faults
    decodegate faults --markdown > docs/faults.md

    [bold]Exit codes[/bold]

    0 listed, 2 the catalogue cannot be loaded here
    """
    from validation.cli.listing import show_faults

    show_faults(as_markdown)
    return 0


signing.register(app)
fitting.register(app)
fuzzing.register(app)
soaking.register(app)
bench.register(app)
replaying.register(app)
comparing.register(app)
app.add_typer(claiming.app)
app.add_typer(remembering.app)


def _refuse(message: str, words: Sequence[str]) -> int:
    print(f"decodegate: {one_line(message)}", file=sys.stderr)
    return _EXIT_ABORT_BISECT if "--bisect-exit" in words else EXIT_USAGE
