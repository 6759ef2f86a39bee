"""Judges a commit of the synthetic history: `judge_commit.py [--count FILE] [--flaky PERCENT] [--kill-at N] ...`.

--count appends a line a run; --flaky makes that share of the verdicts a coin's, by the run's number; --kill-at kills
the process that started the run, as `kill -9` does, in the N-th run; --interrupt-at does as Ctrl-C does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
runs = 1
if "--count" in options:
    counter = Path(options["--count"])
    with counter.open("a") as file:
        file.write(f"{Path('number.txt').read_text()}\n")
    runs = len(counter.read_text().splitlines())
if runs == int(options.get("--kill-at", 0)):
    os.kill(os.getppid(), signal.SIGKILL)
if runs == int(options.get("--interrupt-at", 0)):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
verdict = Path("verdict.txt").read_text().strip()
# What a test leaves behind must not reach the next commit.
Path("verdict.txt").write_text("left behind by a run")
Path("leftover.txt").write_text("left behind by a run")
if verdict == "broken":
    sys.exit(125)
draw = random.Random(f"verdict {runs}")
if draw.random() * 100 < int(options.get("--flaky", 0)):
    verdict = draw.choice(["good", "bad"])
sys.exit(verdict != "good")
