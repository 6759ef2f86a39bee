"""The fused GPU kernels of the specialised path, in Triton: a file per fused boundary, each with its contract on top.

They meet the emulation's contracts (`decode_impl/specialized/emulation/`) and are held to it and to the fp64 oracles by
tests, under Triton's interpreter on a CPU and on a GPU in `tests/gpu/`. A kernel's sums have an order of their own, so
that its last FP32 bits may differ from the emulation's; its roundings may not.

Scratch and outputs come from torch's allocator, which a graph capture redirects to its own pool; no op reads a device
value on the host, and no grid depends on one. Only importing this package needs Triton.
"""

from decode_impl.ops import OpTable
from decode_impl.specialized.kernels import (
    attn_res,
    experts,
    kda,
    mla_attend,
    mla_dcp,
    mla_query,
    mla_value,
    moe_front,
    moe_tail,
    norms,
    projection,
    ranks,
    route,
    shared_expert,
)

OPS: OpTable = {
    "projection": projection.projection,
    "rms_norm": norms.rms_norm,
    "all_reduce": ranks.all_reduce,
    "attn_res": attn_res.attn_res,
    "output_mix": attn_res.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "mla_query": mla_query.mla_query,
    "mla_attend": mla_attend.mla_attend,
    "mla_attend_dcp": mla_dcp.mla_attend_dcp,
    "mla_value": mla_value.mla_value,
    "moe_front": moe_front.moe_front,
    "route": route.route,
    "experts": experts.experts,
    "shared_expert": shared_expert.shared_expert,
    "moe_tail": moe_tail.moe_tail,
}
"""Every op of the emulation's table has a kernel, under the same name and with the same signature."""
