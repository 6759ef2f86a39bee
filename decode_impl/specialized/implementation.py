"""Which of its two implementations the specialised path runs on a device: the fused kernels, or their emulation."""

from __future__ import annotations

import importlib.util

import torch

from decode_impl.ops import OpTable

KERNELS, EMULATION = "kernels", "emulation"

_CAPABILITY = (9, 0)
"""The kernels are built for SM90 and later."""


def implementation(device: torch.device) -> str:
    """`kernels` on a CUDA device of capability 9.0 or more with Triton installed, `emulation` elsewhere.

    Never a silent choice: records and reports name it.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return EMULATION
    return KERNELS if importlib.util.find_spec("triton") else EMULATION


def specialized_ops(device: torch.device) -> OpTable:
    """The specialised path's op table on `device`."""
    if implementation(device) == KERNELS:
        from decode_impl.specialized import kernels  # needs Triton, which a CPU installation of torch lacks

        return kernels.OPS
    from decode_impl.specialized import emulation

    return emulation.OPS
