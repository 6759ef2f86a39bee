"""Which of its two implementations the specialised path runs on a device: the fused kernels, or their emulation."""

from __future__ import annotations

import importlib.util
import os

import torch

from decode_impl.deployment import DeploymentError
from decode_impl.ops import OpTable

KERNELS, EMULATION = "kernels", "emulation"

CAPABILITY = (9, 0)
"""The kernels are built for SM90 and later."""


def implementation(device: torch.device) -> str:
    """`kernels` on a CUDA device of capability 9.0 or more with Triton, `emulation` elsewhere.

    `DECODEGATE_KERNELS=0` asks for the emulation there too.

    Never a silent choice: records and reports name it.

    Raises:
        DeploymentError: `DECODEGATE_KERNELS=1` asks for kernels on a CUDA device that cannot run them, or it says
            something else.
    """
    wanted = os.environ.get("DECODEGATE_KERNELS", "")
    if wanted not in ("", "0", "1"):
        raise DeploymentError(f"DECODEGATE_KERNELS is {wanted!r}, allowed are 0 (emulation) and 1 (kernels); unset it")
    if device.type != "cuda" or wanted == "0":
        return EMULATION
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY or not importlib.util.find_spec("triton"):
        if wanted == "1":
            raise DeploymentError(
                f"DECODEGATE_KERNELS=1 needs capability {CAPABILITY} and Triton, this device has {capability}; unset it"
            )
        return EMULATION
    return KERNELS


def specialized_ops(device: torch.device) -> OpTable:
    """The specialised path's op table on `device`."""
    if implementation(device) == KERNELS:
        from decode_impl.specialized import kernels  # needs Triton, which a CPU installation of torch lacks

        return kernels.OPS
    from decode_impl.specialized import emulation

    return emulation.OPS
