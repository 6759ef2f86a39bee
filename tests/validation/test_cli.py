"""The command line teaches: help, lists, and what it says while it works."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import decodegate_toy as toy
import pytest
import typer.main
from rich.console import Console
from toy_commandline import CommandLine

from validation.cli.app import app, main
from validation.gates.base import GateResult
from validation.records.record import gate_doc
from validation.run.progress import Lines, Live
from validation.run.version import version
from validation.verdict import Verdict

README = Path(__file__).parents[2] / "README.md"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_version(decodegate: CommandLine) -> None:
    assert decodegate("--version") == 0
    assert decodegate.out == f"decodegate {version()}\n"


def test_a_source_tree_that_is_not_installed_has_the_command_as_a_module() -> None:
    words = [sys.executable, "-m", "validation", "--version"]
    ran = subprocess.run(words, cwd=README.parent, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == f"decodegate {version()}\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example_and_exit_codes(decodegate: CommandLine, command: str) -> None:
    assert decodegate(*command.split(), "--help") == 0
    assert f"decodegate {command}".strip() in decodegate.out
    assert "Exit codes" in decodegate.out
    assert re.search(r"Example|Start here", decodegate.out)
    examples = [line for line in decodegate.out.splitlines() if "decodegate run" in line]
    assert all(known(line) for line in examples)


def known(line: str) -> bool:
    """Whether a line's `decodegate` command exists, with the options that it gives."""
    words = line[line.index("decodegate") :].split()
    if len(words) == 1 or words[1] in ("--version", "--help"):
        return True
    command = COMMANDS.get(words[1])
    if command is None:
        return False
    rest = words[2:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    own = rest[: rest.index("--")] if "--" in rest else rest
    return all(word in options for word in own if word.startswith("--"))


def test_every_command_of_the_readme_exists() -> None:
    text = README.read_text()
    lines = [line for line in re.findall(r"decodegate [^`\n]*", text) if re.match(r"decodegate [a-z-]+( |$)", line)]
    commands = [line for line in lines if line.split()[1] in COMMANDS or line.split()[1].startswith("-")]
    assert len(commands) >= 6
    assert [line for line in commands if not known(line)] == []
    in_blocks = re.findall(r"^(?:git bisect run )?(decodegate .*)$", text, flags=re.MULTILINE)
    assert [line for line in in_blocks if not known(line)] == []
    targets = re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE)
    assert {
        target for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE) if target not in targets
    } == set()


def test_the_readme_opens_with_the_two_commands() -> None:
    commands = [line.strip() for line in README.read_text().splitlines() if line.startswith("make ")]
    assert [command.split("#")[0].strip() for command in commands[:2]] == ["make run", "make test"]


def test_known_tells_a_wrong_command_from_a_right_one() -> None:
    assert known("decodegate run --seed 3 --gate x")
    assert not known("decodegate run --sead 3")
    assert not known("decodegate judge")


def test_gates_lists_question_needs_cost_and_profiles(
    decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(toy.PROFILE)
    monkeypatch.setattr("validation.profile.PROFILES", tmp_path)
    assert decodegate("gates") == 0
    lines = decodegate.out.splitlines()
    row = {line.split()[1]: line.rstrip() for line in lines}
    error = row["error"]
    for part in ("1", "rounding error at most twice", "run one op", "a second", "mine*"):
        assert part in error
    assert row["ranks"].endswith("none")
    assert list(row) == ["gate", "crash", "error", "idle", "costly", "ranks"]


def test_faults_lists_the_catalogue(decodegate: CommandLine) -> None:
    assert decodegate("faults") == 0
    assert re.search(r"toy\.column\s+one output column is scaled by 1\.5\s+projection\s+specialized", decodegate.out)


def test_progress_off_a_terminal_is_two_plain_lines_a_gate(decodegate: CommandLine) -> None:
    assert decodegate.run() == 0
    assert "error: 5 units\nerror: PASS after" in decodegate.out
    assert "\x1b" not in decodegate.out + decodegate.err


def progress(out: io.StringIO) -> Console:
    return Console(file=out, force_terminal=True, width=100, color_system=None)


def test_live_progress_counts_units_and_leaves_the_verdict() -> None:
    out = io.StringIO()
    doc = gate_doc(toy.ErrorGate(), GateResult("error", Verdict.PASS, "fine"), required=True, units=["a", "b"])
    with Live(progress(out)) as live:
        live.gate_started("error", 3, 1)
        live.unit_done("error", "a")
        live.refresh()
        live.gate_finished(doc, 1.25)
    assert "2/3" in out.getvalue()
    assert "error: PASS after 1.2 s: fine" in out.getvalue()


def test_plain_progress_mentions_units_measured_before() -> None:
    out = io.StringIO()
    Lines(Console(file=out)).gate_started("error", 5, 2)
    assert out.getvalue() == "error: 5 units, 2 of them measured before\n"


def test_an_ascii_terminal_is_no_reason_to_crash(decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["run", "--profile", decodegate.profile, "--out", str(decodegate.runs)]) == 0
    assert rb"\u2714 PASS" in raw.getvalue()
