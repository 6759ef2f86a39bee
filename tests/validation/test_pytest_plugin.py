"""`pytest --decodegate-profile`: gates as items, each run by one worker, and nothing unjudged looks green."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import decodegate_toy as toy
import pytest

import validation.cli.running  # noqa: F401 - what is imported before a run in this process is not imported again
from validation.records.storage import RunFolder

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent

CONFTEST = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import decodegate_toy as toy
from validation import loading
from validation.run import environment
from validation.gates import registry as gates
from validation.targets import registry as targets
gates.GATES.clear()
gates.GATES.update(toy.GATES)
targets.TARGETS.clear()
targets.TARGETS["toy"] = "decodegate_toy:ToyTarget"
loading.FAULTS = "decodegate_toy:FAULTS"
"""

OWN_TEST = """
import random, numpy, torch
def test_ours():
    assert torch.get_num_threads() == 1
"""


@pytest.fixture
def project(pytester: pytest.Pytester, toys: None, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with one test of its own and a profile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_own=OWN_TEST)
    profile(pytester, toy.PROFILE)
    return pytester


def profile(project: pytest.Pytester, text: str) -> None:
    (project.path / "toy.toml").write_text(text)


QUIET = ("-p", "no:hypothesispytest", "-p", "no:cacheprovider")
"""Plugins that cost seconds a run and are not the matter here."""


def in_process(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    return project.runpytest_inprocess("--decodegate-profile", "toy.toml", "-p", "no:xdist", *QUIET, *words)


def test_the_plugin_is_registered_and_costs_nothing_until_asked_for() -> None:
    found = [entry.value for entry in metadata.entry_points(group="pytest11") if entry.name == "decodegate"]
    assert found == ["validation.pytest_plugin"]
    code = "import sys, validation.pytest_plugin; sys.exit(any(name in sys.modules for name in ('torch', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_option_there_are_only_the_projects_own_tests(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("-p", "no:xdist", *QUIET).assert_outcomes(passed=1)


def test_every_gate_is_one_more_item(project: pytest.Pytester) -> None:
    in_process(project).assert_outcomes(passed=3)
    records = [RunFolder(path).read_record() for path in (project.path / "runs").iterdir()]
    assert {gate.name for record in records for gate in record.stable.gates} == {"error", "costly"}
    assert all((project.path / "runs" / record.run.id / "report.html").exists() for record in records)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [(("-m", "decodegate"), {"error", "costly"}), (("-k", "costly"), {"costly"}), (("-m", "not decodegate"), set())],
)
def test_marker_and_keyword_choose_among_gates(
    project: pytest.Pytester, choice: tuple[str, str], chosen: set[str]
) -> None:
    found = in_process(project, "--collect-only", "-q", *choice).stdout.str()
    assert {gate for gate in ("error", "costly") if f"decodegate::toy::{gate}" in found} == chosen


def test_a_failed_gate_fails_and_says_why_without_a_traceback(project: pytest.Pytester) -> None:
    profile(project, toy.PROFILE.replace("error", "idle"))
    result = in_process(project)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*FAIL: no unit opened the candidate arm*", "report: *report.html"])
    assert "Traceback" not in result.stdout.str()


def test_a_required_gate_that_was_not_judged_fails_and_another_is_skipped(project: pytest.Pytester) -> None:
    unjudged = toy.PROFILE.replace("costly", "crash") + "\n[gates.ranks]\nrows = [1]\n"
    profile(project, unjudged.replace('"crash"', '"crash", "ranks"'))
    result = in_process(project)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["ERROR: *"])
    result.stdout.fnmatch_lines(["SKIPPED: *capability 'ranks'*"])
    profile(project, unjudged.replace(', "crash"', ""))
    in_process(project).assert_outcomes(passed=2, skipped=2)


def test_a_wrong_profile_is_a_usage_error_before_anything_runs(project: pytest.Pytester) -> None:
    profile(project, toy.PROFILE.replace("rows = [32, 64]", "rows = []"))
    result = in_process(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: decodegate: *rows must be a list of row counts*"])
    assert not (project.path / "runs").exists()


def test_a_model_that_cannot_be_loaded_fails_the_gates(project: pytest.Pytester) -> None:
    result = in_process(project, "--decodegate-model", ".")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*holds no toy*"])


def test_threads_and_random_generators_are_given_back(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own="""
        import random, numpy, torch, pytest
        def state():
            return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        @pytest.fixture(scope="session", autouse=True)
        def unchanged():
            before = state()
            yield
            assert state() == before
        def test_ours():
            pass
        """
    )
    in_process(project).assert_outcomes(passed=3)


@pytest.mark.slow
def test_under_xdist_each_gate_is_run_by_one_worker(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    log = project.path / "measured.txt"
    monkeypatch.setenv("TOY_LOG", str(log))
    result = project.runpytest_subprocess("--decodegate-profile", "toy.toml", "-n", "2", *QUIET)
    result.assert_outcomes(passed=3)
    assert sorted(toy.measured(log)) == sorted(f"rows-{rows}" for rows in (1, 2, 4, 8, 16, 32, 64))
