"""Stress the collectives' kernels on GPUs: delayed steps compared bit for bit, negative controls, stalled ranks.

    python -m benchmarks.sync_gpu OUT --gpus 2 [--steps 10000]     a process per GPU, symmetric memory
    python -m benchmarks.sync_gpu OUT --local 2 [--steps 10000]    ranks as streams of one GPU

Writes OUT/sync_gpu.json and OUT/sync_gpu.md. Exit code 0: no failure, every control caught, every stop told.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.sync_gpu_ranks import SIZES, Fleet, Rank, counted, delays_of
from decode_impl.specialized.kernels import signals
from validation.sync.evidence import upper_bound

POINTS = ("data", "flag", "wait", "read", "return")
KINDS = ("one_shot", "two_shot", "in_place")
LIMIT_US, SHORT_US = 10_000_000, 400_000
CHECKED_EVERY = 500
CALLS = 6
"""Calls of a captured graph."""

CONTROLS = {
    "flag before data": (signals.FLAG_FIRST, ("one_shot",), True),
    "baked epoch": (signals.BAKED_EPOCH, ("one_shot",), True),
    "shared counter across shapes": (signals.SHARED_COUNTER, ("one_shot", "two_shot"), True),
    "wrong parity on odd layers": (signals.ODD_LAYERS, ("one_shot",), True),
    "missing barrier": (signals.NO_WAIT, ("one_shot",), True),
    "no exit barrier": (signals.NO_EXIT, ("in_place",), True),
    "relaxed flag of device scope": (signals.RELAXED, ("one_shot",), False),
}
"""Name -> variant, calls, and whether it must be caught: hardware may keep an order that a relaxed flag leaves open."""


def stress(
    fleet: Fleet,
    steps: int,
    seed: int,
    delayed: bool,
    kinds: tuple[str, ...] = KINDS,
    share: float = 0.05,
    longest: int = 200,
) -> Any:
    """Steps of changing kind and size; with delays at the sync points, load on another stream, and poisoned inputs."""
    plan = delays_of(seed, steps, fleet.ranks, share, longest)
    on_device = plan.to(fleet.device)
    draw = random.Random(seed)
    calls = [(draw.choice(kinds), draw.choice(SIZES)) for _ in range(steps)]
    load, side = torch.ones(2**24, device=fleet.device), torch.cuda.Stream(fleet.device)
    done, errors = 0, [""]
    for step, (kind, n) in enumerate(calls):
        for rank in fleet.mine:
            rank.at.stalls = on_device[step, rank.at.rank] if delayed else None
        fleet.each(lambda rank, kind=kind, n=n: rank.run(kind, n))  # type: ignore[misc]
        if delayed and step % 10 == 0:
            with torch.cuda.stream(side):
                load.mul_(1.0001)
        done = step + 1
        if done % CHECKED_EVERY == 0 or done == steps:
            errors = fleet.finish()
            if any(errors):
                break
    return {
        "steps": done,
        "wrong": [int(rank.wrong) for rank in fleet.mine],
        "digest": [int(rank.digest) for rank in fleet.mine],
        "errors": [error for error in errors if error],
        "delays": counted(fleet, plan[:done], POINTS) if delayed else {},
    }


def replayed(fleet: Fleet, replays: int, seed: int) -> Any:
    """Back-to-back replays of a captured graph whose inputs and delays change from replay to replay."""
    plan = delays_of(seed, replays, fleet.ranks, 0.05, 200).to(fleet.device)
    stalls = {rank.at.rank: torch.zeros(8, dtype=torch.int32, device=fleet.device) for rank in fleet.mine}
    for rank in fleet.mine:
        rank.at.stalls = stalls[rank.at.rank]
        rank.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(rank.graph, stream=rank.stream):
            for call in range(CALLS):
                rank.run(KINDS[call % len(KINDS)], SIZES[call % len(SIZES)])
    fleet.meet()

    def again(rank: Rank, replay: int) -> None:
        stalls[rank.at.rank].copy_(plan[replay, rank.at.rank])
        rank.graph.replay()

    for replay in range(replays):
        fleet.each(lambda rank, replay=replay: again(rank, replay))  # type: ignore[misc]
    errors = fleet.finish()
    return {"replays": replays, "wrong": [int(r.wrong) for r in fleet.mine], "errors": [e for e in errors if e]}


def stalled(fleet: Fleet, graph: bool) -> Any:
    """Rank 0 does not take part in a step: every other rank must say so in time, and rank 0 when it comes."""
    if graph:
        replayed(fleet, 2, 1)
    else:
        fleet.each(lambda rank: rank.run("one_shot", SIZES[0]))
        fleet.finish()
    began = datetime.now(UTC)
    late = [rank for rank in fleet.mine if rank.at.rank == 0]
    for rank in [*(rank for rank in fleet.mine if rank.at.rank), *late]:
        if rank.at.rank == 0:
            torch.cuda.synchronize(fleet.device)
            fleet.meet()
        with torch.cuda.stream(rank.stream):
            rank.graph.replay() if graph else rank.run("two_shot", SIZES[1])
    if not late:
        torch.cuda.synchronize(fleet.device)
        fleet.meet()
    seconds = (datetime.now(UTC) - began).total_seconds()
    return {"said": fleet.finish(), "seconds": seconds, "limit_s": SHORT_US / 1e6}


def disagreed(fleet: Fleet) -> Any:
    """The last rank decides otherwise."""
    words = {r.at.rank: torch.tensor([7 + (r.at.rank == fleet.ranks - 1)], dtype=torch.int32) for r in fleet.mine}
    placed = {rank: word.to(fleet.device) for rank, word in words.items()}
    torch.cuda.synchronize(fleet.device)
    fleet.each(lambda rank: rank.at.agree(placed[rank.at.rank]))
    return {"said": fleet.finish()}


def measure(ranks: int, local: bool, steps: int) -> dict[str, Any]:
    """Everything, on a fresh workspace each time, in every process."""
    found: dict[str, Any] = {}

    def fleet(limit: int = LIMIT_US, wrong: Any = 0) -> Fleet:
        return Fleet(ranks, local, limit, int(getattr(wrong, "value", wrong)))

    def keep(name: str, what: Any, at: Fleet) -> None:
        found[name] = at.gathered(what)
        at.meet()
        print(name, found[name], flush=True)

    for name, delayed in (("quiet", False), ("delayed", True)):
        at = fleet()
        keep(name, stress(at, steps, 0, delayed), at)
    at = fleet()
    keep("graphs", replayed(at, max(1, steps // 10), 0), at)
    for name, (wrong, kinds, _) in CONTROLS.items():
        at = fleet(SHORT_US, wrong)
        keep(f"control: {name}", stress(at, min(steps, 500), 1, True, kinds, 0.3, 2000), at)
    for name, graph in (("stalled", False), ("stalled under graph replay", True)):
        at = fleet(SHORT_US)
        keep(name, stalled(at, graph), at)
    at = fleet(SHORT_US)
    keep("disagreed", disagreed(at), at)
    return found


def judged(found: dict[str, Any]) -> list[str]:
    """What speaks against the kernels, or against this run."""
    against = [
        f"{name}: {part['wrong']} wrong values, {part['errors']}"
        for name in ("quiet", "delayed", "graphs")
        for part in found[name]
        if any(part["wrong"]) or part["errors"]
    ]
    if [p["digest"] for p in found["quiet"]] != [p["digest"] for p in found["delayed"]]:
        against.append("the delayed run has other bits than the quiet one")
    for name, (_, _, required) in CONTROLS.items():
        if required and not any(any(p["wrong"]) or p["errors"] for p in found[f"control: {name}"]):
            against.append(f"control {name} was not caught")
    for name in ("stalled", "stalled under graph replay", "disagreed"):
        silent = [said for part in found[name] for said in part["said"] if not said.startswith("Rank")]
        slow = [part["seconds"] for part in found[name] if part.get("seconds", 0) > 2 * SHORT_US / 1e6 + 1]
        against += [f"{name}: a rank said nothing"] * bool(silent) + [f"{name}: took {slow} s"] * bool(slow)
    return against


def page(found: dict[str, Any], about: dict[str, Any], against: list[str]) -> str:
    """The result as Markdown."""
    delayed = found["delayed"][0]
    failed = sum(any(part["wrong"]) or bool(part["errors"]) for part in found["delayed"])
    lines = [f"# Collectives under stress, {about['ranks']} ranks {about['where']}", ""]
    lines += [
        f"{about['date']}, {about['device']}, torch {about['torch']}, Triton {about['triton']}: `{about['command']}`",
        "",
    ]
    bound = upper_bound(failed, delayed["steps"])
    lines += [
        f"{delayed['steps']} delayed steps, {failed} failures: at most {bound:.1e} a step at 95 %. Delays by sync "
        f"point: {delayed['delays']}. {found['graphs'][0]['replays']} graph replays of {CALLS} calls.",
        "",
    ]
    lines += ["| control | must be caught | seen |", "|---|---|---|"]
    for name, (_, _, required) in CONTROLS.items():
        parts = found[f"control: {name}"]
        wrong, errors = sum(sum(p["wrong"]) for p in parts), sum(len(p["errors"]) for p in parts)
        lines.append(f"| {name} | {'yes' if required else 'no'} | {wrong} wrong values, {errors} ranks gave up |")
    for name in ("stalled", "stalled under graph replay", "disagreed"):
        lines += ["", f"**{name}**", "", *(f"- {said}" for part in found[name] for said in part["said"])]
    return "\n".join([*lines, "", "Against it: " + ("; ".join(against) or "nothing"), ""])


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=int, metavar="N")
    where.add_argument("--local", type=int, metavar="N")
    parser.add_argument("--steps", type=int, default=10_000)
    chosen = parser.parse_args()
    ranks = chosen.gpus or chosen.local
    if chosen.gpus and "LOCAL_RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        return subprocess.run([*command, "benchmarks.sync_gpu", *sys.argv[1:]], check=False).returncode
    if chosen.gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = measure(ranks, chosen.local is not None, chosen.steps)
    against = judged(found)
    if not chosen.gpus or os.environ["LOCAL_RANK"] == "0":
        _write(chosen.out, found, against, ranks, chosen.local is not None)
    if chosen.gpus:
        torch.distributed.destroy_process_group()
    return 1 if against else 0


def _write(out: Path, found: dict[str, Any], against: list[str], ranks: int, local: bool) -> None:
    import triton

    where = "--local" if local else "--gpus"
    about = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ranks": ranks,
        "where": "on one GPU, a stream each" if local else "on as many GPUs, symmetric memory",
        "command": f"python -m benchmarks.sync_gpu OUT {where} {ranks} --steps {found['delayed'][0]['steps']}",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "sync_gpu.json").write_text(json.dumps({"about": about, "found": found, "against": against}, indent=1))
    (out / "sync_gpu.md").write_text(page(found, about, against))
    print(page(found, about, against))


if __name__ == "__main__":
    sys.exit(main())
