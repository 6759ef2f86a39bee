"""A synthetic repository of 200 commits with one regression, and the program that judges one of its commits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

COMMITS = 200

JUDGE = Path(__file__).with_name("judge_commit.py")
"""Judges the working folder; see its arguments there."""


def git(repo: Path, *words: str) -> str:
    """What git prints in `repo`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *words], cwd=repo, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def make_history(repo: Path, culprit: int, unbuildable: Collection[int] = (), commits: int = COMMITS) -> list[str]:
    """Commits 1 to `commits`, oldest first; from `culprit` on `verdict.txt` says bad. Returns their ids."""
    repo.mkdir(parents=True)
    git(repo, "init", "--quiet", "--initial-branch=main")
    lines: list[str] = []
    for number in range(1, commits + 1):
        verdict = "broken" if number in unbuildable else "bad" if number >= culprit else "good"
        subject = f"change {number}"
        lines += ["commit refs/heads/main", f"mark :{number}", f"committer A <a@example.com> {10**9 + number} +0000"]
        lines += [f"data {len(subject)}", subject, *([f"from :{number - 1}"] if number > 1 else [])]
        for name, content in (("verdict.txt", verdict), ("number.txt", str(number))):
            lines += [f"M 100644 inline {name}", f"data {len(content)}", content]
    subprocess.run(["git", "fast-import", "--quiet"], cwd=repo, input="\n".join(lines).encode() + b"\n", check=True)
    git(repo, "checkout", "--quiet", "main")
    return git(repo, "rev-list", "--reverse", "main").split()


def judge(*words: str) -> list[str]:
    """The command that judges the working folder."""
    return [sys.executable, "-S", str(JUDGE), *words]
