"""The command line itself loads nothing heavy: what takes long to import is imported when a command needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "scipy", "numpy", "cryptography", "pydantic")


@pytest.mark.parametrize(
    "module",
    ["validation.cli.signing", "validation.cli.remembering", "validation.cli.claiming", "validation.cli.fitting"],
)
def test_a_commands_module_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
