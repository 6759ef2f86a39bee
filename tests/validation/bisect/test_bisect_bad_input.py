"""What a bisection over commits does with bad input, hostile names, and commands that do not behave."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from synthetic_history import git, judge, make_history

from validation.bisect.commits.launch import __file__ as launcher
from validation.bisect.commits.state import Method
from validation.cli import bisect_commits
from validation.cli.app import main
from validation.cli.bisect_commits import command_of

SHORT = 4


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Four commits; the third breaks it."""
    make_history(tmp_path / "repo", culprit=3, commits=SHORT)
    return tmp_path / "repo"


def bisect(repo: Path, *words: str, good: str = "main~3", bad: str = "main") -> int:
    out = repo.parent / "runs"
    return main(["bisect", "commits", "--repo", str(repo), "--out", str(out), "--good", good, "--bad", bad, *words])


@pytest.mark.parametrize(
    ("options", "good", "bad", "message"),
    [
        ((), "main", "main~3", "is not an ancestor of"),
        ((), "main", "main", "are the same commit"),
        ((), "no-such-branch", "main", "has no such commit"),
        ((), "--upload-pack=touch x", "main", "is not the name of a commit"),
        ((), "$(touch x)", "main", "has no such commit"),
        (("--repo", "/"), "main~1", "main", "is no git repository"),
        (("--repo", "/no/such/folder"), "main~1", "main", "is no git repository"),
        (("--build", "make 'unclosed"), "main~1", "main", "cannot be split into words"),
        (("--resume", "../../etc"), "main~1", "main", "is not a run id"),
        (("--resume", "no-such-run"), "main~1", "main", "there is no run 'no-such-run'"),
        (("--posterior", "1"), "main~1", "main", "--posterior"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: tuple[str, ...], good: str, bad: str, message: str, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect(repo, *options, "--", *judge(), good=good, bad=bad) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (repo.parent / "runs").exists()


def test_a_command_and_both_ends_are_needed(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisect(repo) == 2
    assert "what shall judge a commit?" in capsys.readouterr().err
    assert main(["bisect", "commits", "--repo", str(repo), "--", "true"]) == 2
    assert "--good and --bad are needed" in capsys.readouterr().err


def test_arguments_and_paths_with_shell_characters_stay_what_they_are(tmp_path: Path) -> None:
    repo = tmp_path / "-a 'repo'; touch hacked\n$(touch hacked)"
    make_history(repo, culprit=3, commits=SHORT)
    seen = tmp_path / "seen"
    hostile = "; touch hacked && `touch hacked` $(touch hacked)\n*"
    program = f"import sys; open({str(seen)!r}, 'w').write(sys.argv[1]); sys.exit(open('verdict.txt').read() != 'good')"
    build = f"{sys.executable} -S -c \"import sys; assert sys.argv[1] == '; touch hacked'\" '; touch hacked'"
    words = ["bisect", "commits", "--repo", str(repo), "--out", str(tmp_path / "runs"), "--build", build]
    words += ["--good", "main~3", "--bad", "main", "--", sys.executable, "-S", "-c", program, hostile]
    assert main(words) == 1
    assert seen.read_text() == hostile
    assert not list(tmp_path.rglob("hacked"))


def test_what_a_commit_says_of_itself_is_never_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "repo"
    make_history(repo, culprit=9, commits=2)
    (repo / "verdict.txt").write_text("bad")
    git(repo, "-c", "user.name=\x1b[31mA", "-c", "user.email=a", "commit", "-qam", "[bold]\x1b]0;title\x07 broken")
    assert bisect(repo, "--", *judge(), good="main~2") == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[bold]" in said


@pytest.mark.parametrize("code", [128, 129, 255])
def test_exit_codes_of_128_and_above_stop_the_search_which_can_go_on(
    code: int, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = repo.parent / "mended"
    program = (
        f"import os, sys; sys.exit(open('verdict.txt').read() != 'good' if os.path.exists({str(mended)!r}) else {code})"
    )
    assert bisect(repo, "--", sys.executable, "-S", "-c", program) == 2
    error = capsys.readouterr().err
    assert f"ended with exit code {code}" in error
    mended.touch()
    resume = error.split("go on with: decodegate ")[1].split()
    assert main(resume) == 1


@pytest.mark.parametrize("code", [125, 126, 127])
def test_exit_codes_that_cannot_judge_skip_a_commit(code: int, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = f"import sys; n = open('number.txt').read(); sys.exit({{'1': 0, '2': {code}, '3': 1, '4': 1}}[n])"
    assert bisect(repo, "--", sys.executable, "-S", "-c", program) == 3
    assert "one of these" in capsys.readouterr().out


def test_a_run_out_of_time_is_skipped_with_all_that_it_started(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = repo.parent / "child"
    program = (
        "import subprocess, sys, time\n"
        "if open('number.txt').read() == '2':\n"
        f"    open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "    time.sleep(60)\n"
        "sys.exit(open('verdict.txt').read() != 'good')"
    )
    assert bisect(repo, "--timeout", "3", "--", sys.executable, "-S", "-c", program) == 3
    assert "skip (out of time)" in capsys.readouterr().out
    for _ in range(50):
        status = Path(f"/proc/{child.read_text()}/status")
        if not status.exists() or "zombie" in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the command's child outlived it")


def test_a_commit_that_does_not_build_is_skipped_and_its_output_kept(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = f"{sys.executable} -S -c \"import sys; print('building'); sys.exit(open('number.txt').read() == '2')\""
    assert bisect(repo, "--build", build, "--", *judge()) == 3
    assert "skip (not built: exit code 1)" in capsys.readouterr().out
    logs = [log.read_text() for log in (repo.parent / "runs").glob("*/logs/*.txt")]
    assert all("building" in log for log in logs)


def test_ctrl_c_keeps_the_verdicts_and_says_how_to_go_on(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = judge("--count", str(repo.parent / "count"), "--interrupt-at", "2")
    assert bisect(repo, "--", *command) == 130
    error = capsys.readouterr().err
    assert "tree-" not in git(repo, "worktree", "list")
    assert main(error.split("go on with: decodegate ")[1].split()) == 1


def test_a_torn_or_foreign_state_is_refused(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisect(repo, "--", *judge()) == 1
    [file] = (repo.parent / "runs").glob("*/bisect.json")
    whole = json.loads(file.read_bytes())
    for content in (b"", file.read_bytes()[:99], json.dumps({**whole, "schema_version": 2}).encode(), b"[" * 10**5):
        file.write_bytes(content)
        capsys.readouterr()
        assert main(["bisect", "commits", "--resume", file.parent.name, "--out", str(file.parents[1])]) == 2
        assert "is not a whole state" in capsys.readouterr().err
    file.unlink()
    os.mkfifo(file)
    assert main(["bisect", "commits", "--resume", file.parent.name, "--out", str(file.parents[1])]) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_a_resumed_search_is_asked_nothing_else(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisect(repo, "--", *judge()) == 1
    [folder] = (repo.parent / "runs").iterdir()
    capsys.readouterr()
    assert bisect(repo, "--resume", folder.name, "--", "true") == 2
    assert "keeps what it was asked; leave out --good, --bad, a command" in capsys.readouterr().err


def test_a_command_that_destroys_the_worktree_does_not_lead_git_into_the_users_tree(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repo)
    (repo / "verdict.txt").write_text("the user's own change")
    (repo / "untracked.txt").write_text("the user's own file")
    command = [sys.executable, "-S", "-c", "import os; os.remove('.git')"]
    assert main(["bisect", "commits", "--good", "main~3", "--bad", "main", "--", *command]) == 4
    said = capsys.readouterr().err
    assert "not a git repository" in said
    assert "go on with: decodegate bisect commits --resume" in said
    assert said.count("\n") == 1, "no traceback"
    assert (repo / "verdict.txt").read_text() == "the user's own change"
    assert (repo / "untracked.txt").read_text() == "the user's own file"


def test_evidence_is_kept_where_the_folder_of_runs_is_a_relative_path(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo.parent)
    program = (
        "import os, sys, pathlib\n"
        "pathlib.Path(os.environ['DECODEGATE_EVIDENCE'], 'note').write_text('seen')\n"
        "sys.exit(open('verdict.txt').read() != 'good')"
    )
    words = ["--repo", "repo", "--good", "main~3", "--bad", "main", "--", sys.executable, "-S", "-c", program]
    assert main(["bisect", "commits", *words]) == 1
    [state] = Path("runs").glob("*/bisect.json")
    assert len(list(state.parent.glob("evidence/*/note"))) == len(json.loads(state.read_bytes())["trials"])


def test_two_searches_do_not_work_on_one_run(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = judge("--count", str(repo.parent / "count"), "--interrupt-at", "2")
    assert bisect(repo, "--", *command) == 130
    resume = capsys.readouterr().err.split("go on with: decodegate ")[1].split()
    from validation.records.storage import RunFolder

    with RunFolder.find(repo.parent / "runs", resume[3]).lock():
        assert main(resume) == 2
    assert "is in use" in capsys.readouterr().err


def test_gate_options_run_the_checkouts_own_decodegate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "repo"
    package = repo / "validation" / "cli"
    package.mkdir(parents=True)
    git(repo, "init", "-q", "-b", "main")
    app = "import sys\ndef main():\n    print(sys.argv[1:], __file__)\n    return {code}\n"
    for number, source in enumerate(
        (None, app.format(code=0), "import no_such_module", app.format(code=0), app.format(code=1))
    ):
        (repo / "number").write_text(str(number))
        if source is not None:
            (package / "app.py").write_text(source)
        git(repo, "add", "-A")
        git(repo, "-c", "user.name=A", "-c", "user.email=a", "commit", "-qm", f"change {number}")
    assert bisect(repo, "--", "--profile", "smoke") == 1
    assert "change 4" in capsys.readouterr().out
    log = next((tmp_path / "runs").glob("*/logs/0002-*.txt")).read_text()
    assert "['run', '--profile', 'smoke', '--bisect-exit', '--out'" in log
    assert f"{os.sep}tree-" in log
    assert bisect(repo, "--", "--profile", "smoke", good="main~4") == 3
    assert "--good cannot be judged" in capsys.readouterr().out


def test_a_noisy_gate_is_bisected_by_bayes_unless_told_otherwise() -> None:
    choose = bisect_commits._method
    assert choose("auto", ("--gate", "stability")) is Method.BAYES
    assert choose("auto", ("--gate=stability",)) is Method.BAYES
    assert choose("auto", ("--gate", "parity")) is Method.PLAIN
    assert choose("plain", ("--gate", "stability")) is Method.PLAIN
    assert choose("auto", ()) is Method.PLAIN


def test_the_command_behind_the_dashes_is_kept_word_for_word() -> None:
    assert command_of(("./judge.sh", "-x", "a b")) == (["./judge.sh", "-x", "a b"], False)
    command, gate = command_of(("--gate", "parity"))
    assert (command[:3], gate) == ([sys.executable, launcher, "run"], True)
    assert command[3:] == ["--gate", "parity", "--bisect-exit"]
    with pytest.raises(ValueError, match="--resume cannot stand among the gate options"):
        command_of(("--resume", "x"))
