"""Compile kernels for SM90 without a GPU, and read what the assembler gave them: registers, spills, shared memory.

    python -m benchmarks.kernel_resources [OP ...] [--rows N ...] [--ranks N ...]

Every launch of an op is compiled for the arguments that it would run with and then not launched, so that
the figures are those of the true shard sizes (specialisation on divisible sizes and aligned pointers included).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernel_shapes import SHARDS, case_of
from decode_impl.ops import call_on_case
from decode_impl.specialized.kernels import OPS
from numerics.families import FAMILIES, MINI, make_case

SM90 = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Resources:
    """One compiled kernel: registers a thread, bytes of spill stack and local memory a thread, shared bytes a CTA."""

    name: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    spills: int
    shared: int
    ptx: str
    ttgir: str

    def __str__(self) -> str:
        return (
            f"{self.name:32} grid {self.grid!s:16} warps {self.warps:2} registers {self.registers:3} "
            f"spills {self.spills} shared {self.shared}"
        )


@contextmanager
def compiled_launches() -> Iterator[list[Resources]]:
    """While it lasts, launches compile for SM90 instead of running; yields the list that they are added to."""
    found: list[Resources] = []

    def launch(kernel: JITFunction, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            compiled = JITFunction.run(kernel, *args, grid=grid, warmup=True, **kwargs)
            found.append(_resources(kernel.__name__, grid, compiled))

        return compile_only

    original, active = JITFunction.__getitem__, driver._active
    JITFunction.__getitem__ = launch
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: SM90, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    try:
        yield found
    finally:
        JITFunction.__getitem__, driver._active = original, active


def _resources(name: str, grid: Any, compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [str(_TOOLS / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = _USAGE.search(text)
    if usage is None:
        raise RuntimeError(f"cuobjdump told no resource usage of {name}: {text!r}")
    registers, stack, _, local = map(int, usage.groups())
    metadata = compiled.metadata
    return Resources(
        name,
        tuple(grid),
        metadata.num_warps,
        registers,
        stack + local,
        metadata.shared,
        compiled.asm["ptx"],
        compiled.asm["ttgir"],
    )


def _small(op: str, rows: int) -> dict[str, Any]:
    """The tests' case of an op; a verify step has `rows` rows in all."""
    requests = max(1, rows // MINI["verify_width"]) if op == "kda_verify" else rows
    return make_case(op, MINI, FAMILIES[op][0], requests, 0)


def main() -> None:
    """Print the resources of every kernel of the ops named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=sorted(OPS), metavar="OP", help="all, if none is named")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--ranks", nargs="+", type=int, choices=SHARDS, default=list(SHARDS))
    parser.add_argument("--small", action="store_true", help="the small cases of the tests instead of K3's shards")
    chosen = parser.parse_args()
    for op in chosen.ops:
        if op not in OPS:
            parser.error(f"no op {op!r}; there are {', '.join(sorted(OPS))}")
        for ranks in [0] if chosen.small else chosen.ranks:
            for rows in chosen.rows:
                case = _small(op, rows) if chosen.small else case_of(op, ranks, rows, "cpu")
                with compiled_launches() as found:
                    call_on_case(OPS, op, case, in_place=True)
                for resources in found:
                    print(f"{f'TP{ranks}' if ranks else 'small'} B{rows:<2} {op:14} {resources}", flush=True)


if __name__ == "__main__":
    main()
