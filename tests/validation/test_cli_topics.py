"""Commands in modules of their own: they load nothing heavy, and their help has an example and exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from toy_commandline import CommandLine

HEAVY = ("torch", "matplotlib", "scipy", "numpy", "cryptography", "pydantic")


@pytest.mark.parametrize(
    "module",
    [f"validation.cli.{name}" for name in ("signing", "remembering", "claiming", "fitting", "bench")],
)
def test_a_commands_module_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "claims compare",
        *(
            f"history {name}"
            for name in ("add", "list", "trend", "compare", "baseline", "baseline set", "baseline show")
        ),
    ],
)
def test_help_of_a_command_inside_a_group_has_an_example_and_exit_codes(decodegate: CommandLine, command: str) -> None:
    assert decodegate(*command.split(), "--help") == 0
    for part in (f"decodegate {command}", "Example", "Exit codes"):
        assert part in decodegate.out
