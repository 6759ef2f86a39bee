"""Live vLLM servers: started together, waited for, killed, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

ITEMS, SEED = 12, 0
"""The generated AIME items that the checkpoints know by heart."""

START_SECONDS = 900
"""Three start in two minutes where two cores are free; on a busy machine it takes many times that."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or every server takes the same core
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # it then says how it was configured
}
OPTIONS = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", "--no-enable-prefix-caching"]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class LiveServer:
    """`vllm serve` on a checkpoint, in a process group of its own."""

    def __init__(self, python: str, checkpoint: Path, log: Path, extra: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.log = log
        # `vllm serve` asks for the metadata of a package called vllm, which the CPU build is not.
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        self._command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += [*OPTIONS, *extra]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start; `wait` waits until it serves."""
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command, stdout=sink, stderr=sink, start_new_session=True, env={**os.environ, **ENVIRONMENT}
            )

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended: {self.tail()}"
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/models", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server does not serve after {START_SECONDS} s: {self.tail()}")

    def kill(self) -> None:
        """End it at once, with its engine: what a crash looks like from outside."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


@dataclass(frozen=True)
class Servers:
    """Live servers by what is wrong with them."""

    baseline: LiveServer
    equal: LiveServer
    damaged: LiveServer
