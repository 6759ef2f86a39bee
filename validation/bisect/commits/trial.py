"""One run of a command at one commit: an argument list, no shell, its output kept, its exit code read as git does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from validation.bisect.commits.git import check_out, environment, scrub
from validation.bisect.commits.state import Method, Outcome, Question, Trial
from validation.errors import UsageError, one_line
from validation.records.storage import RunFolder

EVIDENCE = "DECODEGATE_EVIDENCE"
"""Environment variable: a folder in which the command may leave what it wants kept."""

_SKIP, _NOT_RUN, _ABORT = 125, (126, 127), 128


def run_trial(question: Question, folder: RunFolder, tree: Path, commit: str, number: int) -> Trial:
    """Check out, build, run, and say what came of it. Output goes to `logs/` in the run's folder.

    Raises:
        UsageError: the command says, as to `git bisect run`, that it makes no sense to go on (exit code 128 and above).
    """
    name = f"{number:04d}-{commit[:12]}"
    # The command runs elsewhere: a relative path would lead it into the worktree.
    log, evidence = folder.file("logs", f"{name}.txt").resolve(), folder.file("evidence", name).resolve()
    log.parent.mkdir(exist_ok=True)
    evidence.mkdir(parents=True, exist_ok=True)
    check_out(tree, commit)
    began = time.monotonic()
    outcome, why = _judged(question, tree, log, evidence, number)
    # Nothing that a run leaves may reach the next commit, or keep git from checking it out.
    scrub(tree, question.keep_ignored)
    if not any(evidence.iterdir()):
        evidence.rmdir()
    seconds = round(time.monotonic() - began, 3)
    return Trial(commit=commit, outcome=outcome, why=why, seconds=seconds, log=f"logs/{log.name}")


def _judged(question: Question, tree: Path, log: Path, evidence: Path, number: int) -> tuple[Outcome, str]:
    if question.build:
        code = _run(question.build, tree, log, evidence, question.timeout)
        if code != 0:
            return Outcome.SKIP, f"not built: {_in_words(code)}"
    code = _run(command_of(question, evidence, number), tree, log, evidence, question.timeout)
    if code is None or code == _SKIP or code in _NOT_RUN:
        return Outcome.SKIP, _in_words(code)
    if code < 0 or code >= _ABORT:
        raise UsageError(
            f"the command ended with {_in_words(code)} at {log.stem[5:]}, which stops it; see {str(log)!r}"
        )
    return (Outcome.BAD if code else Outcome.GOOD), _in_words(code)


def command_of(question: Question, evidence: Path, number: int) -> list[str]:
    """The command of one run. A gate keeps its record among the evidence; noisy verdicts need another seed each."""
    words = list(question.command)
    if question.gate and "--out" not in words:
        words += ["--out", str(evidence)]
    if question.gate and question.method is Method.BAYES and "--seed" not in words:
        words += ["--seed", str(number)]
    return words


def _run(words: Sequence[str], tree: Path, log: Path, evidence: Path, timeout: float | None) -> int | None:
    """The exit code, negative for a signal; 127 where it cannot be started, None where it ran out of time."""
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                words,
                cwd=tree,
                env={**environment(), EVIDENCE: str(evidence)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{one_line(words[0])}: {one_line(error)}\n".encode())
            return _NOT_RUN[1]
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Whatever ends the wait, an interrupt included: nothing that the command started may outlive it.
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_words(code: int | None) -> str:
    if code is None:
        return "out of time"
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code}"
