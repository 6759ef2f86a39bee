"""The one place of fused GPU kernels: a file per op of docs/ops.md, each with the signature of its emulation.

A kernel is held to its emulation (`decode_impl/specialized/emulation/`) and to the fp64 oracle by `tests/gpu/`.
None is here yet; on every device the specialised path runs its emulation, and says so in the run record.
"""
