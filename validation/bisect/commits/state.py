"""What a bisection over commits is asked and has seen: its state file, from which it resumes."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from validation.errors import UsageError, one_line
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.records.jsonio import pretty
from validation.records.storage import RunFolder
from validation.verdict import Verdict

STATE_FILE = "bisect.json"


class Method(StrEnum):
    """How commits are chosen."""

    PLAIN = "plain"
    BAYES = "bayes"


class Outcome(StrEnum):
    """What one run says of a commit; a skipped one cannot be judged."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Commit = Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")


class Question(_Doc):
    """What is asked. `command` runs in the worktree; with `gate` it is decodegate's own."""

    repo: str
    good: str = Commit
    bad: str = Commit
    method: Method
    command: list[str] = Field(min_length=1)
    gate: bool = False
    build: list[str] = []
    keep_ignored: bool = False
    timeout: float | None = Field(default=None, gt=0)
    posterior: float = Field(gt=0.5, lt=1)
    wrong: float | None = Field(default=None, ge=0, lt=0.5)
    most_runs: int = Field(ge=2)


class Trial(_Doc):
    """One run of the command at one commit."""

    commit: str = Commit
    outcome: Outcome
    why: str
    seconds: float
    log: str


class Answer(_Doc):
    """What was concluded. `suspects` holds one commit, or those that cannot be told apart, oldest first."""

    verdict: Verdict
    summary: str
    suspects: list[str] = []


class State(_Doc):
    """The state file."""

    schema_version: Literal[1] = 1
    question: Question
    trials: list[Trial] = []
    answer: Answer | None = None


def write_state(folder: RunFolder, state: State) -> None:
    """Keep the state; a reader sees the old file or the whole new one."""
    folder.write(pretty(state.model_dump(mode="json")), STATE_FILE)


def read_state(folder: RunFolder) -> State:
    """The state of an earlier bisection.

    Raises:
        UsageError: there is none, or it is not one of this version.
    """
    path = folder.file(STATE_FILE)
    try:
        return State.model_validate_json(
            read_limited(path, LARGEST_TEXT_FILE, "state of a bisection", "it is no bisection over commits")
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{str(path)!r} is not a whole state: {where}: {one_line(first['msg'])}") from error
