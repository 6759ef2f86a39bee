"""`bisect commits` finds the commit with real git and real processes, resumes, and never touches the user's tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_history import git, judge, make_history

from validation.cli.app import main

CULPRIT = 137


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """200 commits, the regression in commit 137; ten commits near it cannot be built."""
    repo = tmp_path_factory.mktemp("history") / "a repository"
    return repo, make_history(repo, CULPRIT, unbuildable={*range(96, 104), 130, 140})


def words_of(repo: Path, out: Path, commits: list[str], *options: str) -> list[str]:
    ends = ["--good", commits[0], "--bad", commits[-1]]
    return ["bisect", "commits", "--repo", str(repo), "--out", str(out), *ends, *options]


def state_of(out: Path) -> dict[str, object]:
    [file] = out.glob("*/bisect.json")
    state: dict[str, object] = json.loads(file.read_bytes())
    return state


def footprint(repo: Path) -> dict[str, object]:
    """All of the user's that a bisection must leave as it is."""
    files = {str(p.relative_to(repo)): p.read_bytes() for p in repo.rglob("*") if p.is_file() and ".git" not in p.parts}
    said = {
        what: git(repo, *what.split()) for what in ("for-each-ref", "status --porcelain", "worktree list", "stash list")
    }
    kept = ("HEAD", "index", "config", "logs/HEAD")
    return {**files, **said, **{name: (repo / ".git" / name).read_bytes() for name in kept}}


def test_one_regression_among_200_commits_is_found_exactly_and_unbuildable_commits_are_skipped(
    history: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, commits = history
    count = tmp_path / "count"
    assert main(words_of(repo, tmp_path / "runs", commits, "--", *judge("--count", str(count)))) == 1
    said = capsys.readouterr().out
    state = state_of(tmp_path / "runs")
    assert state["answer"]["suspects"] == [commits[CULPRIT - 1]]
    assert f"{commits[CULPRIT - 1]} 2001-09-09 A: change {CULPRIT}" in said
    # Both ends, ceil(log2 199) halvings, skipped ones aside, and the result judged twice.
    judged = [trial for trial in state["trials"] if trial["outcome"] != "skip"]
    assert len(judged) <= 2 + 8 + 2
    assert len(count.read_text().splitlines()) == len(state["trials"])
    assert {trial["outcome"] for trial in state["trials"]} == {"good", "bad", "skip"}


def test_the_commands_printed_show_the_failure_again(
    history: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, commits = history
    words = ["--repo", str(repo), "--out", str(tmp_path), "--good", commits[131], "--bad", commits[138]]
    assert main(["bisect", "commits", *words, "--", *judge()]) == 1
    lines = capsys.readouterr().out.split("again:\n")[1].splitlines()[:3]
    shown = subprocess.run(["bash", "-c", " && ".join(lines)], capture_output=True)
    assert shown.returncode == 1
    git(repo, "worktree", "remove", "--force", lines[1].split("cd ")[1])


WATCHING_JUDGE = """
import subprocess, sys
refs = subprocess.run(["git", "-C", sys.argv[1], "for-each-ref"], capture_output=True, text=True).stdout
open(sys.argv[2], "a").write(refs)
sys.exit(open("verdict.txt").read() != "good")
"""


def test_the_users_tree_index_and_refs_are_never_touched(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repo, commits = history
    (repo / ".git" / "hooks" / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path / 'hook'}\n")
    (repo / ".git" / "hooks" / "post-checkout").chmod(0o755)
    (repo / "number.txt").write_text("the user's own change")
    (repo / "untracked.txt").write_text("the user's own file")
    git(repo, "status")
    before = footprint(repo)
    during = tmp_path / "during"
    command = [sys.executable, "-S", "-c", WATCHING_JUDGE, str(repo), str(during)]
    assert main(words_of(repo, tmp_path / "runs", commits, "--", *command)) == 1
    assert footprint(repo) == before
    assert set(during.read_text().splitlines()) == {str(before["for-each-ref"]).strip()}
    assert not (tmp_path / "hook").exists()
    assert not list(tmp_path.glob("runs/*/tree-*"))


@pytest.mark.parametrize("method", ["plain", "bayes"])
def test_a_search_killed_in_the_middle_resumes_and_loses_at_most_the_run_in_flight(
    method: str, history: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, commits = history
    count, out = tmp_path / "count", tmp_path / "runs"
    command = judge("--count", str(count), "--kill-at", "6")
    words = words_of(repo, out, commits, "--method", method, "--", *command)
    start = "import sys; from validation.cli.app import main; sys.exit(main())"
    killed = subprocess.run([sys.executable, "-c", start, *words], capture_output=True, cwd=Path(__file__).parents[3])
    assert killed.returncode == -9
    state = state_of(out)
    assert (len(state["trials"]), state["answer"]) == (5, None)
    [folder] = out.iterdir()
    assert main(["bisect", "commits", "--resume", folder.name, "--out", str(out)]) == 1
    done = state_of(out)
    assert done["answer"]["suspects"] == [commits[CULPRIT - 1]]
    assert done["trials"][:5] == state["trials"]
    assert len(count.read_text().splitlines()) == len(done["trials"]) + 1
    assert "tree-" not in git(repo, "worktree", "list")
    assert main(["bisect", "commits", "--resume", folder.name, "--out", str(out)]) == 1
    assert len(count.read_text().splitlines()) == len(done["trials"]) + 1
    assert capsys.readouterr().out.count(f"change {CULPRIT}\nFAIL") == 2


def test_flaky_verdicts_are_bisected_with_real_git_and_processes(
    history: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, commits = history
    flaky = judge("--count", str(tmp_path / "count"), "--flaky", "25")
    assert main(words_of(repo, tmp_path / "runs", commits, "--method", "bayes", "--", *flaky)) == 1
    state = state_of(tmp_path / "runs")
    assert state["answer"]["suspects"] == [commits[CULPRIT - 1]]
    assert "posterior 0.99" in capsys.readouterr().out


def test_plain_bisection_says_that_verdicts_do_not_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commits = make_history(tmp_path / "repo", culprit=4, commits=5)
    count = tmp_path / "count"
    always_bad_from_run_5 = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; open({str(count)!r}, 'a').write('x'); runs = len(open({str(count)!r}).read()); "
        "sys.exit(open('verdict.txt').read() != 'good' or runs > 5)",
    ]
    assert main(words_of(tmp_path / "repo", tmp_path / "runs", commits, "--", *always_bad_from_run_5)) == 3
    assert "verdicts do not repeat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("unbuildable", "first", "last", "code", "message"),
    [
        ((), 140, 200, 3, "--good fails too: look further back"),
        ((), 1, 100, 0, "nothing to bisect: --bad passes"),
        ((135, 136), 1, 200, 3, "the first bad commit is one of these"),
        ((200,), 1, 200, 3, "--bad cannot be judged"),
        ((1,), 1, 200, 3, "--good cannot be judged"),
    ],
)
def test_what_cannot_be_found_is_said(
    unbuildable: tuple[int, ...],
    first: int,
    last: int,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commits = make_history(tmp_path / "repo", CULPRIT, unbuildable)
    words = words_of(tmp_path / "repo", tmp_path / "runs", commits[first - 1 : last], "--", *judge())
    assert main(words) == code
    assert message in capsys.readouterr().out
    if unbuildable == (135, 136):
        assert state_of(tmp_path / "runs")["answer"]["suspects"] == commits[134:137]


@pytest.mark.parametrize(
    ("first", "last", "code", "message"),
    [(1, 100, 0, "nothing to bisect: 0 of"), (140, 200, 3, "--good fails as often as --bad")],
)
def test_bayes_ends_where_nothing_changed(
    first: int, last: int, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = make_history(tmp_path / "repo", CULPRIT)[first - 1 : last]
    assert main(words_of(tmp_path / "repo", tmp_path / "runs", commits, "--method", "bayes", "--", *judge())) == code
    assert message in capsys.readouterr().out
    assert len(state_of(tmp_path / "runs")["trials"]) <= 20


@pytest.mark.parametrize("method", ["plain", "bayes"])
def test_a_search_whose_runs_were_spent_goes_on_with_more(
    method: str, history: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo, commits = history
    out, count = tmp_path / "runs", tmp_path / "count"
    words = words_of(repo, out, commits, "--method", method, "--most-runs", "4", "--", *judge("--count", str(count)))
    assert main(words) == 3
    said = capsys.readouterr().out
    assert "4 runs were not enough; go on with: decodegate bisect commits --resume" in said
    run = next(out.iterdir()).name
    again = ["bisect", "commits", "--resume", run, "--out", str(out)]
    assert main(again) == 3, "without more of them there is no other answer"
    assert main([*again, "--most-runs", "300"]) == 1
    assert state_of(out)["answer"]["suspects"] == [commits[CULPRIT - 1]]
    assert len(count.read_text().splitlines()) == len(state_of(out)["trials"]), "no run was repeated"


def test_what_was_merged_beside_the_first_parents_is_no_good_end_for_bayes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "repo"
    commits = make_history(repo, culprit=2, commits=4)
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    git(repo, "checkout", "--quiet", "-b", "side/branch", commits[0])
    (repo / "side.txt").write_text("x")
    git(repo, "add", "side.txt")
    git(repo, *identity, "commit", "--quiet", "-m", "beside")
    side = git(repo, "rev-parse", "HEAD").strip()
    git(repo, "checkout", "--quiet", "main")
    git(repo, *identity, "merge", "--quiet", "--no-edit", "side/branch")
    words = ["bisect", "commits", "--repo", str(repo), "--out", str(tmp_path / "runs"), "--good", side, "--bad", "main"]
    assert main([*words, "--method", "bayes", "--", *judge()]) == 2
    assert "came in by a merge, and bayes walks along first parents" in capsys.readouterr().err
    # `git bisect` walks all parents: of the commits that are not in the branch, the second of main is the first.
    assert main([*words, "--method", "plain", "--", *judge()]) == 1
    assert state_of(tmp_path / "runs")["answer"]["suspects"] == [commits[1]]


def test_bayes_names_all_commits_that_unbuildable_ones_keep_together(tmp_path: Path) -> None:
    commits = make_history(tmp_path / "repo", 7, unbuildable=(5, 6), commits=10)
    assert main(words_of(tmp_path / "repo", tmp_path / "runs", commits, "--method", "bayes", "--", *judge())) == 3
    assert state_of(tmp_path / "runs")["answer"]["suspects"] == commits[4:7]
