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

LIMIT = 2**31
NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on: the address space is not counted as memory."""

KDA, EXPERTS = ("conv_state", "state"), ("w13_packed", "w13_scale", "w2_packed", "w2_scale")
POOLS: dict[str, tuple[str, ...]] = {
    "kda_step": KDA,
    "kda_verify": KDA,
    "mla_query": ("cache",),
    "mla_attend": ("cache",),
    "mla_attend_dcp": ("cache.0", "cache.1"),
    "experts": EXPERTS,
}
"""Inputs that grow with slots, pages or experts."""

INDICES = {
    "kda_step": ("slots",),
    "kda_verify": ("sources", "targets"),
    "mla_query": ("positions",),
    "mla_attend": ("block_table",),
    "mla_attend_dcp": ("block_table",),
    "experts": ("ids",),
}
"""Inputs that say where in a pool something is: slots, flat positions, pages or experts."""

OPS = tuple(POOLS)

DIMS = {
    **K3_SHARD_8,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "verify_width": 2,
    "ranks": 2,
    "experts_held": 4,
    "num_experts_per_token": 2,
    "routed_expert_hidden_size": 512,
    "moe_intermediate_size": 256,
}
"""True sizes of states and rows. Experts are smaller and so many more, as is what does not lie in a pool."""


def units(ops: Sequence[str], deep: bool) -> list[Unit]:
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
    return {**unit.params, "width": "tp8", "cases": [measured]}


def _broken(op: str, case: dict[str, Any], arm: Arm) -> int:
    """Elements that differ between the small pool and every large one."""
    small = arm.run_op(op, case)
    broken = 0
    for shift in _shifts(op, case):
        moved = _moved(op, case, shift)
        large = arm.run_op(op, moved, in_place=True)
        broken += sum(_differs(small[name], large[name]) for name in small if name not in POOLS[op])
        broken += sum(_pool_differs(small[pool], large[pool]) for pool in POOLS[op] if pool in small)
        del moved, large
    return broken


def _shifts(op: str, case: dict[str, Any]) -> list[int]:
    """Entries to move by, so that an offset in bytes or in elements of one of the pools no longer fits 32 bits.

    The scales of experts come along: entries that many would be needless address space.
    """
    pools = [case[name] for name in POOLS[op] if not name.endswith("_scale")]
    sizes = {x[0].numel() * unit for x in pools for unit in (1, x.element_size())}
    return [LIMIT // size + 1 for size in sorted(sizes, reverse=True)]


def _moved(op: str, case: dict[str, Any], shift: int) -> dict[str, Any]:
    """The case with all of its pools' entries `shift` further on; the null one stays, where there is one."""
    step = case["cache"].shape[1] if op == "mla_query" else 1
    first = 0 if op == "experts" else 1
    moved = dict(case)
    for name in INDICES[op]:
        index = case[name]
        moved[name] = torch.where(index >= step * first, index + shift * step, index)
    for name in POOLS[op]:
        own = case[name]
        large = virtual((own.shape[0] + shift, *own.shape[1:]), own.dtype)
        large[:first], large[shift + first :] = own[:first], own[first:]
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
