"""The environment of a record is that of this process and of the source tree, not of a repository around it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from validation.run.environment import environment, git_state, set_threads


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_the_commit_and_changes_of_a_work_tree(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git(tmp_path, "init")
    (tmp_path / "inside").mkdir()
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit, dirty = git_state(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == (commit, True)
    assert git_state(tmp_path / "inside") == (None, None), "a folder inside another repository is not that repository"


@pytest.mark.usefixtures("toys")
def test_the_environment_is_that_of_this_process() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1
        here = environment()
        assert here.threads == 1
        assert here.python == platform.python_version()
        assert here.torch == torch.__version__
        assert here.cpu_count >= 1
        assert set_threads(None) == 1
    finally:
        torch.set_num_threads(before)
