"""How far valid roundings of the baseline are from each other, and how far the candidate and every fault are.

The figures behind the parity gate's allowances: run it again when the model or the generic path changes.

    python benchmarks/parity_floor.py [--sequences 8] [--decode 16]
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from numerics.logits import LogitStats
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.parity.measure import KL_RESOLUTION, windows
from validation.targets.base import ArmConfig
from validation.targets.builtin import BuiltinTarget

PROMPT, SEED = 48, 5


def decode(target: BuiltinTarget, sequences: list[list[int]], backend: str, ranks: int, *faults: Fault) -> Tensor:
    """Teacher-forced logits, f32 [steps, sequences, vocab], with an FP8 cache."""
    config = ArmConfig(
        "arm",
        decode_backend=backend,
        kv_cache_dtype="fp8",
        tensor_parallel=ranks,
        max_batch=len(sequences),
        max_context=len(sequences[0]),
        faults=faults,
    )
    return torch.stack([step.logits for step in target.open(config).forced_decode(sequences, PROMPT)])


def distance(reference: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL, and typical KL (geometric mean over tokens), in nats."""
    stats = LogitStats()
    stats.add(reference, other)
    kl = stats.per_token()["kl"]
    return float(kl.mean()), math.exp(float((kl + KL_RESOLUTION).log().mean()))


def main() -> None:
    """Print one Markdown row per comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--decode", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = BuiltinTarget.load(None)
    sequences = windows(target, options.sequences, PROMPT + options.decode, SEED)
    generic = {ranks: decode(target, sequences, "auto", ranks) for ranks in (1, 2, 4, 8, 16)}
    floor = distance(generic[1], generic[2])
    print(f"model {target.fingerprint()['weights_sha256'][:12]}, torch {torch.__version__}, ", end="")
    print(f"n = {generic[1].shape[0] * generic[1].shape[1]} tokens; floor: TP 1 against TP 2")
    print("\n| comparison | mean KL | typical KL | mean, in floors | typical, in floors |\n|---|--:|--:|--:|--:|")

    def row(name: str, reference: Tensor, other: Tensor) -> None:
        mean, typical = distance(reference, other)
        print(f"| {name} | {mean:.2e} | {typical:.2e} | {mean / floor[0]:.2f} | {typical / floor[1]:.2f} |", flush=True)

    for a, b in ((1, 2), (1, 4), (1, 8), (8, 4), (8, 16)):
        row(f"generic TP {a} / generic TP {b}", generic[a], generic[b])
    for ranks in (1, 8):
        candidate = decode(target, sequences, "latency_specialized", ranks)
        row(f"generic TP {ranks} / specialised TP {ranks}", generic[ranks], candidate)
    for fault in FAULTS.values():
        broken = decode(target, sequences, "latency_specialized", 1, fault)
        row(f"generic TP 1 / specialised with {fault.id}", generic[1], broken)


if __name__ == "__main__":
    main()
