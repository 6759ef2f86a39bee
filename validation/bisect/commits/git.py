"""git, called with argument lists, and a worktree of our own beside the user's, which is never touched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from validation.errors import MachineryError, UsageError, one_line

# The user's hooks must not run for our checkouts, and nothing may collect garbage meanwhile.
_ALWAYS = ("-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "advice.detachedHead=false")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LONGEST_CALL = 600
"""Seconds that one git command may take; a checkout of a large tree takes a minute."""


class GitError(MachineryError):
    """A git command that failed: what was asked, and git's own words."""


def environment() -> dict[str, str]:
    """This process's environment without what would lead git, or Python's bytecode cache, elsewhere.

    Bytecode is kept by a source's size and second: two commits of one second would run each other's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "PYTHONDONTWRITEBYTECODE": "1"}


def git(where: Path, *arguments: str, upward: bool = False) -> str:
    """What a git command prints, run in `where`, which must be the top of a repository or a worktree.

    Only with `upward` may git look above it: a command may have destroyed a worktree of ours that lies inside the
    user's, and what scrubs ours must not find theirs.

    Raises:
        GitError: it failed, cannot be started, or took too long.
    """
    words = ["git", *_ALWAYS, *arguments]
    bounds = {} if upward else {"GIT_CEILING_DIRECTORIES": str(where.resolve().parent)}
    try:
        done = subprocess.run(
            words,
            cwd=where,
            env={**environment(), **bounds},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_CALL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]}: {one_line(error)}") from error
    if done.returncode:
        raise GitError(f"git {arguments[0]} said: {one_line(done.stderr or done.stdout) or done.returncode}")
    return done.stdout


def repository(path: Path) -> Path:
    """The top of the work tree, or the bare repository, that `path` lies in.

    Raises:
        UsageError: there is none.
    """
    try:
        bare = git(path, "rev-parse", "--is-bare-repository", upward=True).strip() == "true"
        what = "--absolute-git-dir" if bare else "--show-toplevel"
        top = git(path, "rev-parse", what, upward=True).removesuffix("\n")
    except GitError as error:
        raise UsageError(f"{str(path)!r} is no git repository ({error}); --repo names one") from error
    return Path(top)


def commit_id(repo: Path, name: str, option: str) -> str:
    """The full id of the commit that the user calls `name`.

    Raises:
        UsageError: there is no such commit.
    """
    if name.startswith("-") or not name or "\0" in name:
        raise UsageError(f"{option} {name!r} is not the name of a commit")
    try:
        found = git(repo, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except GitError:
        found = ""
    if not _COMMIT.fullmatch(found):
        raise UsageError(f"{option} {name!r}: {str(repo)!r} has no such commit")
    return found


def require_ancestor(repo: Path, good: str, bad: str) -> None:
    """Refuse two ends with no line of commits between them.

    Raises:
        UsageError: `good` is not an ancestor of `bad`, or is the same commit.
    """
    if good == bad:
        raise UsageError(f"--good and --bad are the same commit, {good[:12]}; there is nothing between them")
    try:
        git(repo, "merge-base", "--is-ancestor", good, bad)
    except GitError:
        raise UsageError(
            f"--good {good[:12]} is not an ancestor of --bad {bad[:12]}; give the commit where they parted"
        ) from None


def first_parents(repo: Path, good: str, bad: str) -> list[str]:
    """Commits from `good` to `bad` along first parents, oldest first, both included."""
    return [good, *git(repo, "rev-list", "--first-parent", "--reverse", f"{good}..{bad}").split()]


def require_first_parent(repo: Path, good: str, bad: str) -> None:
    """Refuse a good commit beside the line of first parents: what came onto that line before it was merged is not
    known to be good.

    Raises:
        UsageError: `good` is an ancestor of `bad` only through a merged branch.
    """
    if good not in git(repo, "rev-list", "--first-parent", bad).split():
        raise UsageError(
            f"--good {good[:12]} came in by a merge, and bayes walks along first parents; give a commit of that line, "
            "or --method plain"
        )


def about(repo: Path, commit: str) -> str:
    """A commit in one line: id, date, author, subject."""
    return one_line(git(repo, "log", "-1", "--format=%H %ad %an: %s", "--date=short", commit))


def parent(repo: Path, commit: str) -> str:
    """The first parent of a commit."""
    return git(repo, "rev-parse", "--verify", f"{commit}^").strip()


@contextmanager
def worktree(repo: Path, path: Path, commit: str) -> Iterator[Path]:
    """A detached worktree at `path`, removed again on the way out. One that a killed process left there is replaced.

    Raises:
        UsageError: git cannot make it.
    """
    remove_worktree(repo, path)
    try:
        git(repo, "worktree", "add", "--force", "--detach", str(path), commit)
    except GitError as error:
        raise UsageError(f"no worktree can be made at {str(path)!r}: {error}") from error
    try:
        yield path
    finally:
        remove_worktree(repo, path)


def remove_worktree(repo: Path, path: Path) -> None:
    """Remove our worktree and git's note of it, whatever state it is in. Nobody else's is looked at."""
    try:
        git(repo, "worktree", "remove", "--force", "--force", str(path))
    except GitError:
        # Not a worktree (any more): at most a folder is left.
        shutil.rmtree(path, ignore_errors=True)


def scrub(tree: Path, keep_ignored: bool) -> None:
    """Take away all that a run left in a worktree of ours; ignored files as asked."""
    git(tree, "reset", "--hard", "--quiet")
    git(tree, "clean", "-ffdq" if keep_ignored else "-ffdxq")


def check_out(tree: Path, commit: str) -> None:
    """Bring a clean worktree of ours to a commit."""
    git(tree, "checkout", "--quiet", "--force", "--detach", commit)


def bisect(tree: Path, words: Sequence[str]) -> None:
    """One `git bisect` command in a worktree of ours, whose bisect refs are its own.

    Raises:
        GitError: git could not do it; running out of commits is no failure.
    """
    try:
        git(tree, "bisect", *words)
    except GitError:
        # `git bisect` also fails where only skipped commits are left, and says so in its log.
        if "# only skipped commits left" not in git(tree, "bisect", "log"):
            raise
