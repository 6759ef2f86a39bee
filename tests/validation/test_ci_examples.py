"""The CI files in examples/ are valid, and every command in them is one that the command line takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from validation.cli.app import app
from validation.profile import load_profile, profile_names
from validation.signoff.policy import load_policy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ci"
GITHUB = sorted((FOLDER / "github").glob("*.yml"))
GITLAB = sorted((FOLDER / "gitlab").glob("*.yml"))


def content(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def scripts(value: Any) -> Iterator[str]:
    """Every shell line in a file: `run` of GitHub's steps, `script` and its like of GitLab's jobs."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("run", "script", "before_script", "after_script"):
                for text in item if isinstance(item, list) else [item]:
                    yield from text.splitlines()
            else:
                yield from scripts(item)
    elif isinstance(value, list):
        for item in value:
            yield from scripts(item)


def commands(path: Path) -> list[list[str]]:
    """The words of every decodegate command in a file."""
    lines = (line.strip().removesuffix(" || red=$?") for line in scripts(content(path)))
    return [shlex.split(line) for line in lines if line.startswith("decodegate ")]


def parse(words: list[str]) -> None:
    """Let the command line parse the words without running anything; a wrong option raises."""
    command: Any = typer.main.get_command(app)
    context, rest = None, words[1:]
    name = words[0]
    while True:
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("path", [*GITHUB, *GITLAB], ids=lambda path: path.name)
def test_every_command_is_one_that_the_command_line_takes(path: Path) -> None:
    found = commands(path)
    assert found
    for words in found:
        parse(words)
        if "--profile" in words:
            assert words[words.index("--profile") + 1] in profile_names()


@pytest.mark.parametrize("wrong", ["decodegate run --profil smoke", "decodegate judge", "decodegate signoff runs/x"])
def test_a_wrong_command_would_be_seen(wrong: str) -> None:
    with pytest.raises(Exception, match=r"No such|Missing") as caught:
        parse(shlex.split(wrong))
    assert not isinstance(caught.value, AssertionError)


def test_there_is_a_premerge_and_a_nightly_file_for_both() -> None:
    github = {word for path in GITHUB for words in commands(path) for word in words}
    gitlab = {word for path in GITLAB for words in commands(path) for word in words}
    assert {"premerge", "nightly"} <= github & gitlab


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_github_files_have_what_a_workflow_needs(path: Path) -> None:
    workflow = content(path)
    # YAML 1.1 reads the key `on` as true.
    assert workflow["name"]
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        assert job["steps"][-1]["if"] == "always()", "evidence is kept whatever the verdict"
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"actions/[a-z-]+(/[a-z]+)?@v\d+", step.get("uses", "actions/x@v1"))


@pytest.mark.parametrize("path", GITLAB, ids=lambda path: path.name)
def test_gitlab_files_show_junit_in_every_job(path: Path) -> None:
    jobs = content(path)
    template = jobs.pop(".decodegate")
    for job in jobs.values():
        assert job["extends"] == ".decodegate"
        artifacts = job.get("artifacts", template["artifacts"])
        assert artifacts["reports"]["junit"] == "runs/*/junit.xml"
        assert artifacts["when"] == "always"
        assert job["rules"]


def test_the_history_of_a_red_night_is_kept() -> None:
    steps = content(FOLDER / "github" / "decodegate-nightly.yml")["jobs"]["gates"]["steps"]
    used = [step.get("uses", "") for step in steps]
    assert not any(use.startswith("actions/cache@") for use in used), "it keeps nothing of a job that failed"
    assert steps[used.index("actions/cache/save@v4")]["if"] == "always()"
    (gitlab,) = GITLAB
    assert content(gitlab)["decodegate nightly"]["cache"]["when"] == "always"


@pytest.mark.parametrize("path", [*GITHUB, *GITLAB], ids=lambda path: path.name)
def test_records_know_their_commit_because_the_install_is_editable(path: Path) -> None:
    installs = [line for line in scripts(content(path)) if "pip install" in line]
    assert installs
    assert all("--editable ." in line for line in installs)


def test_secrets_are_never_on_a_command_line() -> None:
    for path in (*GITHUB, *GITLAB):
        assert not any("secrets." in line for line in scripts(content(path)))


def test_the_policy_beside_them_is_valid() -> None:
    policy = load_policy(FOLDER / "policy.toml")
    assert policy.profiles == ["nightly"]


def test_the_policy_requires_every_gate_that_its_profile_requires() -> None:
    policy = load_policy(FOLDER / "policy.toml")
    (name,) = policy.profiles
    assert policy.required == load_profile(name)[1].required


STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $2" in $RED) exit 1;; esac
"""


def night(folder: Path, red: str, key: str | None) -> tuple[int, list[str]]:
    """Run GitLab's nightly script as a runner does, with a `decodegate` that fails where `red` fits; code and calls."""
    stub = folder / "bin" / "decodegate"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    (gitlab,) = GITLAB
    script = "\n".join(content(gitlab)["decodegate nightly"]["script"])
    places = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "RED": red}
    keys = {} if key is None else {"DECODEGATE_KEY": key}
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=folder, env=places | keys, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("red", "code"), [("none", 0), ("run*", 1), ("history?add", 1), ("history?trend", 1), ("signoff*", 1)]
)
def test_a_red_night_on_gitlab_is_remembered_checked_and_ruled_on(tmp_path: Path, red: str, code: int) -> None:
    found, calls = night(tmp_path, red, "key.pem")
    assert found == code
    assert [call.split(" runs/")[0].split(" --")[0] for call in calls] == [
        "run",
        "history add",
        "history trend",
        "signoff",
    ]
    assert "--check" in calls[2]
    assert "--key key.pem" in calls[3]


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_gitlab_signs_nothing_and_gives_no_empty_key(tmp_path: Path, key: str | None) -> None:
    _, calls = night(tmp_path, "none", key)
    assert calls[-1].startswith("signoff ")
    assert "--key" not in calls[-1]


def test_a_red_night_on_github_is_remembered_checked_and_ruled_on() -> None:
    steps = content(FOLDER / "github" / "decodegate-nightly.yml")["jobs"]["gates"]["steps"]
    after = {
        command: step
        for step in steps
        for command in ("history add", "trend --check", "signoff")
        if command in step.get("run", "")
    }
    assert len(after) == 3
    assert all(step["if"] == "always()" for step in after.values())
    assert 'if [ -n "$KEY" ]' in after["signoff"]["run"]
