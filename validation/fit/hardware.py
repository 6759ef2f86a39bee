"""GPUs by name: vendor, architecture and memory, from their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """`capability` is CUDA's (None for another vendor); `memory` in bytes."""

    vendor: str
    capability: tuple[int, int] | None
    memory: float


_GB = 1e9

GPUS = {
    "GB300": Gpu("NVIDIA", (10, 3), 288 * _GB),
    "B300": Gpu("NVIDIA", (10, 3), 288 * _GB),
    "GB200": Gpu("NVIDIA", (10, 0), 186 * _GB),
    "B200": Gpu("NVIDIA", (10, 0), 180 * _GB),
    "H200": Gpu("NVIDIA", (9, 0), 141 * _GB),
    "H100": Gpu("NVIDIA", (9, 0), 80 * _GB),
    "RTX PRO 6000": Gpu("NVIDIA", (12, 0), 96 * _GB),
    "MI355X": Gpu("AMD", None, 288 * _GB),
    "MI300X": Gpu("AMD", None, 192 * _GB),
}
