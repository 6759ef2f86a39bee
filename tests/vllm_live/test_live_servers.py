"""Two live vLLM servers: equal ones pass, a damaged one is told apart, and a crash in mid-run changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from server_profile import profile_of_servers
from servers import ITEMS, SEED, LiveServer, Servers

from evals.runner.endpoint import Endpoint
from validation.soak.server import Server, soak_server
from validation.verdict import EXIT_USAGE, Verdict, exit_code

REPEATS = 8
MARGIN = 0.3
"""The checkpoints know their answers by heart: repeats are one answer, and twelve items decide 25 points."""
PROFILE = profile_of_servers(ITEMS, REPEATS, MARGIN, kind="openai", eval_lines="max_tokens = 24")
COMMAND = "from validation.cli.app import main; raise SystemExit(main())"
PASS, FAIL = exit_code(Verdict.PASS, bisect=False), exit_code(Verdict.FAIL, bisect=False)


class Comparison:
    """`decodegate compare` as a process, and what it leaves behind."""

    def __init__(self, folder: Path, baseline: LiveServer, candidate: LiveServer) -> None:
        self.out = folder / "runs"
        profile = folder / "servers.toml"
        profile.write_text(PROFILE, encoding="utf-8")
        self.start(
            "compare", "--baseline", baseline.url, "--candidate", candidate.url, "--backend", "any",
            "--profile", str(profile), "--seed", str(SEED), "--patience-seconds", "900",
        )  # fmt: skip

    def start(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, "--out", str(self.out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        self.said, _ = self.process.communicate(timeout=900)
        return self.process.returncode

    @property
    def run(self) -> Path:
        return next(self.out.iterdir())

    def samples(self) -> list[dict[str, Any]]:
        """Everything in the journals so far, whole lines only."""
        lines = [line for file in self.out.glob("*/target/*.jsonl") for line in file.read_bytes().split(b"\n")[:-1]]
        entries = [json.loads(line)["content"] for line in lines]
        return [entry for entry in entries if "arm" in entry]

    def keys(self) -> Counter[str]:
        return Counter("{arm}/{request[item]}/{request[repeat]}".format(**entry) for entry in self.samples())

    def until(self, samples: int) -> None:
        deadline = time.monotonic() + 300
        while len(self.samples()) < samples:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def check_samples(self) -> None:
        """Every question has exactly one answer of each arm, and none is an error."""
        asked = {f"{arm}/0-{i}/{r}" for arm in ("baseline", "candidate") for i in range(ITEMS) for r in range(REPEATS)}
        assert set(self.keys()) == asked
        assert set(self.keys().values()) == {1}
        assert {entry["response"]["error"] for entry in self.samples()} == {""}


def test_equal_servers_pass(servers: Servers, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, servers.baseline, servers.equal)
    assert comparison.end() == PASS, comparison.said
    comparison.check_samples()
    effective = comparison.samples()[0]["response"]["effective"]
    assert effective["prompt_tokens"] > 0


def test_a_fault_in_the_candidates_weights_is_told_apart(servers: Servers, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, servers.baseline, servers.damaged)
    assert comparison.end() == FAIL, comparison.said
    assert "aime25" in comparison.said


def test_a_server_that_does_not_show_its_backend_is_refused(servers: Servers, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, servers.baseline, servers.equal)
    comparison.kill()
    comparison.start("compare", "--baseline", servers.baseline.url, "--candidate", servers.equal.url)
    assert comparison.end() == EXIT_USAGE, comparison.said
    assert "was started with 'auto'" in comparison.said


def test_a_server_killed_and_restarted_in_mid_run_changes_nothing(servers: Servers, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, servers.baseline, servers.equal)
    comparison.until(20)
    servers.equal.kill()
    before = len(comparison.samples())
    assert before < 2 * ITEMS * REPEATS, "the run was over before the server was killed"
    servers.equal.start()
    assert comparison.end() == PASS, comparison.said
    comparison.check_samples()


def test_a_comparison_killed_in_mid_run_is_resumed_without_loss_or_double(servers: Servers, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, servers.baseline, servers.equal)
    comparison.until(20)
    comparison.kill()
    kept = comparison.keys()
    comparison.start("run", "--resume", comparison.run.name)
    assert comparison.end() == PASS, comparison.said
    comparison.check_samples()
    assert kept <= comparison.keys()


def test_canaries_of_a_soaked_server_keep_their_text_and_log_probabilities(servers: Servers) -> None:
    left = count(2, -1)
    seen = soak_server(Server(Endpoint(servers.equal.url), SEED), lambda: next(left) > 0)
    assert (seen.rounds, seen.changed, seen.errors) == (2, [], 0)
    assert "log-probabilities of its tokens" in seen.statement
