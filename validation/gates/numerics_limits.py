"""Probe of the numerics gate: pools so large that 32-bit offsets into them wrap, without the memory for them.

A pool lies in address space that the system hands out and never fills: only the pages that are touched exist. Slots
just beyond 2^31 bytes and 2^31 elements must give the bits that they give in a small pool.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from numerics.families import K3_SHARD_8, make_case
from validation.gates.base import Context, Json, Unit
from validation.targets.base import Arm

OPS = ("kda_step", "kda_verify", "mla_query", "mla_attend")
LIMIT = 2**31
NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on: the address space is not counted as memory."""

POOLS = {"kda_step": ("conv_state", "state"), "kda_verify": ("conv_state", "state"), "mla_query": ("cache",)}
INDICES = {
    "kda_step": ("slots",),
    "kda_verify": ("sources", "targets"),
    "mla_query": ("positions",),
    "mla_attend": ("block_table",),
}
"""Inputs that say where in a pool something is: slots, flat positions, or pages."""

DIMS = {**K3_SHARD_8, "q_lora_rank": 64, "qk_nope_head_dim": 32, "verify_width": 2}
"""True sizes of states and rows; what does not lie in a pool is small."""


def plan(ops: Sequence[str], context: Context) -> list[Unit]:
    """A unit per op."""
    return [Unit(f"probe-limits-{op}", {"probe": "limits", "op": op, "rows": 2}) for op in ops]


def measure(unit: Unit, context: Context) -> dict[str, Json]:
    """Bits in a large pool against bits in a small one, both arms."""
    op = unit.params["op"]
    family = "iid_fp8" if op.startswith("mla") else "iid"
    case = make_case(op, DIMS, family, unit.params["rows"], context.seed)
    arms = {"baseline": context.target.open(context.baseline), "candidate": context.target.open(context.candidate)}
    name = "offsets beyond 32 bits"
    contracts = {arm: {name: _broken(op, case, opened)} for arm, opened in arms.items()}
    measured = {
        "family": "pool limits",
        "seed": context.seed,
        "outputs": {},
        "histograms": {},
        "compliance": {arm: {} for arm in arms},
        "router": None,
        "contracts": contracts,
    }
    return {**unit.params, "width": "tp8", "replayable": False, "cases": [measured]}


def _broken(op: str, case: dict[str, Any], arm: Arm) -> int:
    """Elements that differ between the small pool and every large one."""
    small = arm.run_op(op, case)
    pools = ("cache",) if op.startswith("mla") else ("conv_state", "state")
    broken = 0
    for pool in pools:
        for offset_unit in (1, case[pool].element_size()):
            moved = _moved(op, case, pools, LIMIT // offset_unit // case[pool][0].numel() + 1)
            large = arm.run_op(op, moved, in_place=True)
            broken += sum(_differs(small[name], large[name]) for name in small if name not in pools)
            broken += sum(_pool_differs(small[p], large[p]) for p in pools if p in small)
            del moved, large
    return broken


def _moved(op: str, case: dict[str, Any], pools: Sequence[str], shift: int) -> dict[str, Any]:
    """The case with all of its pools' entries but the null one `shift` further on."""
    step = case["cache"].shape[1] if op == "mla_query" else 1
    moved = dict(case)
    for name in INDICES[op]:
        index = case[name]
        moved[name] = torch.where(index >= step, index + shift * step, index)
    for name in pools:
        own = case[name]
        large = virtual((own.shape[0] + shift, *own.shape[1:]), own.dtype)
        large[0], large[shift + 1 :] = own[0], own[1:]
        moved[name] = large
    return moved


def _pool_differs(small: Tensor, large: Tensor) -> int:
    shift = large.shape[0] - small.shape[0]
    stray = int(large[1 : small.shape[0]].count_nonzero())
    return stray + _differs(small[1:], large[shift + 1 :]) + _differs(small[0], large[0])


def _differs(a: Tensor, b: Tensor) -> int:
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def virtual(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros that takes memory only where it is written.

    Raises:
        OSError: the system refuses so much address space.
    """
    elements = 1
    for size in shape:
        elements *= size
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=dtype, count=elements).view(*shape)
