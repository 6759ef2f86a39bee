"""Rank processes on shared memory: started, watched, and what they saw collected."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.sync.shared_memory import bytes_of
from validation.sync.stress_plan import POINTS, StressPlan

_PATIENCE_S, _STEP_S = 120.0, 0.2
"""Seconds for a set, and for each step and rank, a hundred times what they take: only what does hang is killed."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended on every rank: None for a rank that was killed or never came to an end."""

    plan: StressPlan
    ranks: tuple[dict[str, Any] | None, ...]

    @property
    def clean(self) -> bool:
        """Every rank did every step, and all have the same sums."""
        alive = [rank for rank in self.ranks if rank is not None]
        return len(alive) == self.plan.ranks and not self.errors and len({rank["digest"] for rank in alive}) == 1

    @property
    def errors(self) -> list[str]:
        """What the ranks said that gave up."""
        return [rank["error"] for rank in self.ranks if rank is not None and rank["error"]]

    @property
    def digest(self) -> int | None:
        """Digest of rank 0's sums, in the order of the steps."""
        return self.ranks[0]["digest"] if self.ranks[0] is not None else None

    def applied(self) -> dict[str, int]:
        """How often each sync point was delayed, all ranks together."""
        alive = [rank for rank in self.ranks if rank is not None]
        return {point: sum(rank["applied"].get(point, 0) for rank in alive) for point in POINTS}

    def document(self) -> dict[str, Any]:
        """The outcome as plain JSON."""
        return {"plan": self.plan.document(), "ranks": list(self.ranks)}


def stress(plans: Sequence[StressPlan]) -> list[Outcome]:
    """Run these jobs one after another on one set of rank processes; all have the same number of ranks.

    A rank that kills itself ends its process, so such a job can only be the last one.
    """
    ranks = plans[0].ranks
    if any(plan.ranks != ranks for plan in plans) or any(plan.kill for plan in plans[:-1]):
        raise ValueError("jobs of one set need one number of ranks, and a job with a kill is the last")
    with tempfile.TemporaryDirectory(prefix="decodegate-sync-") as name:
        folder = Path(name)
        (folder / "jobs.json").write_text(json.dumps([plan.document() for plan in plans]), encoding="utf-8")
        with (folder / "memory").open("wb") as file:
            file.truncate(bytes_of(ranks) * len(plans))
        processes = [
            subprocess.Popen([sys.executable, "-m", "validation.sync.rank_process", name, str(rank)])
            for rank in range(ranks)
        ]
        try:
            _join(processes, _PATIENCE_S + _STEP_S * ranks * sum(plan.steps for plan in plans))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        seen = [_outcomes(folder / f"outcomes-{rank}.jsonl") for rank in range(ranks)]
    return [
        Outcome(plan, tuple(lines[job] if job < len(lines) else None for lines in seen))
        for job, plan in enumerate(plans)
    ]


def _join(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def _outcomes(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fails(plan: StressPlan, repeats: int = 3) -> bool:
    """Whether most of `repeats` runs of this plan fail: one run alone may be luck."""
    outcomes = stress([plan] * repeats)
    return 2 * sum(not outcome.clean for outcome in outcomes) > repeats
