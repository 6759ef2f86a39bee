"""A stand-in for vLLM's half, made by our own engine: what the comparison says of equals, and of a known fault.

python -m benchmarks.vllm_reference.stand_in cases.json FOLDER [--ranks 4] [--backend auto] [--fault ID]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.vllm_reference.cases import read
from benchmarks.vllm_reference.ours import Variant, decode_all
from benchmarks.vllm_reference.outputs import save
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.runner import BUILTIN_PATHS
from validation.faults.catalogue import FAULTS
from validation.targets.builtin import with_faults


def main() -> None:
    """Write the stand-in's outputs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="auto", choices=("auto", "latency_specialized"))
    parser.add_argument("--fault", choices=sorted(FAULTS))
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = (FAULTS[options.fault],) if options.fault else ()
    variant = Variant(options.ranks, options.backend, with_faults(BUILTIN_PATHS, faults))
    outputs = decode_all(EMBEDDED_MODEL, read(options.cases), variant, not options.no_answers)
    outputs.about |= {"stand-in": True, "fault": options.fault}
    save(options.folder, outputs, *outputs.views)


if __name__ == "__main__":
    main()
