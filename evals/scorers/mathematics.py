"""Equality of mathematical expressions by math-verify, in a process of its own that can be stopped.

A model may box `9^{9^{9^9}}`: evaluating it never ends, and a thread cannot be stopped. So a helper process compares,
one pair a line; it is given `LIMIT` seconds and `MEMORY` bytes, and replaced when it needs more.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

LIMIT = 3.0
"""Seconds for one comparison: honest answers of contests take a tenth of a second."""

START = 60.0
"""Seconds for the helper to import its libraries."""

MEMORY = 4 * 2**30
"""Bytes of address space of the helper."""

_ROOT = Path(__file__).parents[2]
_helper: subprocess.Popen[bytes] | None = None
_lock = threading.Lock()
_endless: set[str] = set()
"""Answers that took too long once: a model that repeats one costs its time once."""


class MathError(RuntimeError):
    """The helper cannot be started at all, so nothing can be compared; the message says why."""


@lru_cache(maxsize=4096)
def equal(answer: str, expected: str, limit: float = LIMIT) -> bool | None:
    """Whether two LaTeX expressions have the same value; None where the answer is none, or takes too long.

    Raises:
        MathError: math-verify cannot be loaded.
    """
    with _lock:
        if answer in _endless:
            return None
        helper = _running()
        line = _ask(helper, {"answer": answer, "expected": expected}, limit)
        if line is None:
            stop(helper)
            _endless.add(answer)
            return None
        verdict = json.loads(line)["equal"]
        return verdict if isinstance(verdict, bool) else None


def stop(helper: subprocess.Popen[bytes] | None = None) -> None:
    """End the helper process, if there is one."""
    global _helper
    ending, _helper = helper or _helper, None
    if ending is not None:
        ending.kill()
        ending.wait()
        for pipe in (ending.stdin, ending.stdout):
            if pipe is not None:
                pipe.close()


def _running() -> subprocess.Popen[bytes]:
    global _helper
    if _helper is not None and _helper.poll() is None:
        return _helper
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "evals.scorers.mathematics_helper", str(MEMORY)]
    _helper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    atexit.register(stop)
    ready = _read(_helper, START)
    if ready is None or not json.loads(ready).get("ready"):
        stop(_helper)
        raise MathError("math-verify cannot be loaded; install it with `pip install math-verify`")
    return _helper


def _ask(helper: subprocess.Popen[bytes], question: dict[str, str], limit: float) -> bytes | None:
    assert helper.stdin is not None
    try:
        helper.stdin.write(json.dumps(question).encode() + b"\n")
        helper.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(helper, limit)


def _read(helper: subprocess.Popen[bytes], limit: float) -> bytes | None:
    """One line from the helper; None where none came in time, or the helper ended."""
    assert helper.stdout is not None
    readable, _, _ = select.select([helper.stdout], [], [], limit)
    return (helper.stdout.readline() or None) if readable else None
