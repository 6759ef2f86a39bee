"""From options to a bisection over commits: the question is checked, the search runs, the answer is printed."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from validation.bisect.commits import launch
from validation.bisect.commits.git import (
    about,
    commit_id,
    parent,
    repository,
    require_ancestor,
    require_first_parent,
)
from validation.bisect.commits.search import CommitSearch, reproduce
from validation.bisect.commits.state import Method, Question, State, read_state
from validation.cli.lines import say
from validation.errors import UsageError
from validation.gates.registry import GATES
from validation.records.storage import RunFolder, new_run_id
from validation.verdict import Verdict, exit_code

NOISY_GATES = frozenset({"sync", "stability", "evals"})
"""Gates whose verdict may differ from run to run: races, acceptance, sampled answers."""

MOST_RUNS = 400
"""Runs after which a search stops, where the user says nothing: five times what a quarter of wrong verdicts need."""


@dataclass(frozen=True)
class CommitOptions:
    """The options of `bisect commits`; None where the user said nothing."""

    good: str | None
    bad: str | None
    repo: Path
    words: tuple[str, ...]
    method: str
    build: str | None
    keep_ignored: bool
    timeout: float | None
    posterior: float
    wrong: float | None
    most_runs: int | None
    resume: str | None
    out: Path


def bisect_commits(options: CommitOptions) -> int:
    """Search, print the commit, the evidence and the command that shows it again, and return the exit code.

    Raises:
        UsageError: something in the options cannot be.
        RunInterrupted: the search was stopped and can be resumed.
    """
    console = Console()
    if options.resume is not None:
        folder = RunFolder.find(options.out, options.resume)
        state = _resumed(folder, options)
    else:
        state = State(question=_question(options))
        folder = RunFolder.create(options.out, new_run_id(datetime.now(UTC)))
    search = CommitSearch(folder, state, lambda line: say(console, line))
    say(
        console,
        f"{state.question.method} bisection in {folder.path}; stopped, it goes on with: {search.resume_command()}",
    )
    answer = search.finish() if state.answer is None else state.answer
    _tell(console, search)
    return exit_code(answer.verdict)


def _resumed(folder: RunFolder, options: CommitOptions) -> State:
    """The state of an earlier search, which may be given more runs.

    Raises:
        UsageError: there is none, or an option asks something else than it was asked.
    """
    state, most = read_state(folder), options.most_runs
    given = {"--good": options.good, "--bad": options.bad, "--build": options.build, "a command": options.words}
    if other := [name for name, value in given.items() if value]:
        raise UsageError(f"run {folder.run_id!r} keeps what it was asked; leave out {', '.join(other)}")
    if most is None or most <= len(state.trials):
        return state
    spent = len(state.trials) >= state.question.most_runs
    question = state.question.model_copy(update={"most_runs": most})
    return state.model_copy(update={"question": question, "answer": None if spent else state.answer})


def command_of(words: tuple[str, ...]) -> tuple[list[str], bool]:
    """The command behind `--`, and whether it is decodegate's own: gate options alone run the checkout's `run`.

    Raises:
        UsageError: there is none, or an option that only the bisection itself may set.
    """
    if not words:
        raise UsageError("what shall judge a commit? Give gate options or a command behind `--`")
    if not words[0].startswith("-"):
        return list(words), False
    if "--resume" in words:
        raise UsageError("--resume cannot stand among the gate options: every commit is judged anew")
    exits = [] if "--bisect-exit" in words else ["--bisect-exit"]
    return [sys.executable, launch.__file__, "run", *words, *exits], True


def _question(options: CommitOptions) -> Question:
    if options.good is None or options.bad is None:
        raise UsageError("--good and --bad are needed: a commit that passes and a later one that fails")
    command, gate = command_of(options.words)
    repo = repository(options.repo)
    good, bad = commit_id(repo, options.good, "--good"), commit_id(repo, options.bad, "--bad")
    require_ancestor(repo, good, bad)
    method = _method(options.method, options.words if gate else ())
    if method is Method.BAYES:
        require_first_parent(repo, good, bad)
    return Question(
        repo=str(repo),
        good=good,
        bad=bad,
        method=method,
        command=command,
        gate=gate,
        build=_split(options.build),
        keep_ignored=options.keep_ignored,
        timeout=options.timeout,
        posterior=options.posterior,
        wrong=options.wrong,
        most_runs=options.most_runs or MOST_RUNS,
    )


def _method(asked: str, gate_options: tuple[str, ...]) -> Method:
    if asked != "auto":
        return Method(asked)
    named = {word.removeprefix("--gate=") for word in gate_options} & GATES.keys()
    return Method.BAYES if named & NOISY_GATES else Method.PLAIN


def _split(build: str | None) -> list[str]:
    try:
        return shlex.split(build or "")
    except ValueError as error:
        raise UsageError(f"--build {build!r} cannot be split into words: {error}") from error


def _tell(console: Console, search: CommitSearch) -> None:
    state, folder = search.state, search.folder
    answer, repo = state.answer, Path(state.question.repo)
    assert answer is not None
    for commit in answer.suspects:
        say(console, about(repo, commit))
    say(console, f"{answer.verdict}: {answer.summary} ({len(state.trials)} runs)")
    around = {*answer.suspects, *(parent(repo, commit) for commit in answer.suspects)}
    for number, trial in enumerate(state.trials, 1):
        if trial.commit in around:
            say(console, f"  run {number}: {trial.commit[:12]} {trial.outcome}, {trial.why}: {folder.path / trial.log}")
    if answer.verdict is Verdict.FAIL:
        say(console, "again:")
        for line in reproduce(state, answer.suspects[0], folder.path):
            say(console, f"  {line}")
    say(console, f"state and logs: {folder.path}{os.sep}")
