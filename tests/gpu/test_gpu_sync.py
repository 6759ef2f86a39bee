"""The collectives' kernels under stress: ranks as streams of one GPU, and on as many GPUs as there are up to four."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

WHERE = [("--local", 2), ("--local", 4), ("--gpus", 2), ("--gpus", 4)]


@pytest.mark.parametrize(("where", "ranks"), WHERE, ids=lambda value: str(value).strip("-"))
def test_delayed_steps_are_right_controls_are_caught_and_every_stop_is_told(
    where: str, ranks: int, tmp_path: Path
) -> None:
    """In processes of their own: a rank that hangs must not take the tests with it."""
    if where == "--gpus" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, there are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "benchmarks.sync_gpu", str(tmp_path), where, str(ranks), "--steps", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "sync_gpu.json").read_text(encoding="utf-8"))
    assert found["against"] == []
    assert [part["steps"] for part in found["found"]["delayed"]] == [300] * (1 if where == "--local" else ranks)
