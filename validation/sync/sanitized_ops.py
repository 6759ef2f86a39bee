"""Every kernel once at a small named shape, for a sanitizer to watch.

compute-sanitizer --tool memcheck python -m validation.sync.sanitized_ops small-8
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from decode_impl.ops import call_on_case
from numerics.families import FAMILIES, MINI, make_case

ROWS = {"small-1": 1, "small-8": 8}


def main(shape: str) -> None:
    """Run every op of the kernels on the GPU."""
    from decode_impl.specialized.kernels import OPS  # needs Triton

    for op in sorted(OPS):
        requests = max(1, ROWS[shape] // MINI["verify_width"]) if op == "kda_verify" else ROWS[shape]
        case = make_case(op, MINI, FAMILIES[op][0], requests, 0)
        call_on_case(OPS, op, _on_gpu(case), in_place=True)
    torch.cuda.synchronize()


def _on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: _on_gpu(item) for key, item in value.items()}
    return type(value)(_on_gpu(item) for item in value) if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ROWS:
        sys.exit(f"usage: python -m validation.sync.sanitized_ops {{{','.join(ROWS)}}}")
    main(sys.argv[1])
