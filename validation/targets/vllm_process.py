"""The other end of `vllm_worker`: starts it, talks to it with a time limit, and never leaves it behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from validation.errors import one_line
from validation.records.jsonio import digest
from validation.targets.base import TargetError

_ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 10
"""For an engine to end by itself before it is killed."""


class VllmProcess:
    """A running engine. Its output goes to `log`; `about` is what it says of itself.

    Raises:
        TargetError: it does not start; with the last line of its log that says why.
    """

    def __init__(self, python: str, engine: dict[str, Any], log: Path, start_seconds: float, seconds: float) -> None:
        self._log, self._seconds = log, seconds
        ours, theirs = os.pipe()
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        try:
            with log.open("ab") as sink:
                self._process = subprocess.Popen(
                    [python, "-m", "validation.targets.vllm_worker", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(theirs,),
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError as error:
            os.close(ours)
            raise TargetError(f"{python} cannot be run ({error.strerror}); `python` names the one with vLLM") from None
        finally:
            os.close(theirs)
        self._replies, self._read = ours, b""
        self.close = weakref.finalize(self, _end, self._process, ours)
        try:
            self.about = self._call(start_seconds, command="start", engine=engine)
        except TargetError:
            self.close()
            raise

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have a command carried out.

        Raises:
            TargetError: it failed, took too long, or the engine has died.
        """
        return self._call(self._seconds, command=command, **arguments)

    def _call(self, seconds: float, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone("has ended") from None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            if not select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()
                raise self._gone(f"did not finish {command['command']!r} within {seconds:g} s")
            part = os.read(self._replies, 2**16)
            if not part:
                raise self._gone("has ended")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise TargetError(f"vLLM: {one_line(reply['error'])} (log: {self._log})")
        return reply

    def _gone(self, what: str) -> TargetError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        telling = [line for line in lines[-200:] if "Error" in line] or lines[-1:]
        return TargetError(f"the vLLM engine {what}: {one_line(telling[-1]) if telling else 'no word'} ({self._log})")


class VllmEngines:
    """Engines by their arguments; at most `most` are open, and the longest unused one makes room.

    Their output goes to `logs`, what they decoded to files that go with this object.
    """

    def __init__(self, python: str, most: int, start_seconds: float, call_seconds: float) -> None:
        self._python, self._most, self._seconds = python, most, (start_seconds, call_seconds)
        self._open: dict[str, VllmProcess] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="decodegate-vllm-")
        self.logs = Path(self._scratch.name)

    def process(self, engine: Mapping[str, Any]) -> VllmProcess:
        """The engine with these arguments, started if need be.

        Raises:
            TargetError: it does not start.
        """
        key = digest(engine)
        process = self._open.pop(key, None)
        if process is None or not process.close.alive:
            while len(self._open) >= self._most:
                self._open.pop(next(iter(self._open))).close()
            self.logs.mkdir(parents=True, exist_ok=True)
            process = VllmProcess(self._python, dict(engine), self.logs / "vllm.log", *self._seconds)
        self._open[key] = process
        return process

    def scratch(self, name: str) -> Path:
        """A file for what an engine decoded."""
        return Path(self._scratch.name) / name

    def close(self) -> None:
        """End all engines."""
        while self._open:
            self._open.popitem()[1].close()


def _end(process: subprocess.Popen[bytes], replies: int) -> None:
    """End the engine with all its workers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    # Workers of an engine that has died stay in its group.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    os.close(replies)
