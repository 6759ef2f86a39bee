"""The fused kernels' contracts in vectorised torch: same boundaries, splits, roundings and orders, fast on a CPU.

The kernels themselves live next door, in `decode_impl/specialized/kernels/`.
"""

from decode_impl.ops import OpTable
from decode_impl.specialized.emulation import attn_res, kda, mla, mla_dcp, moe, projection

OPS: OpTable = {
    "projection": projection.projection,
    "rms_norm": projection.rms_norm,
    "all_reduce": attn_res.all_reduce,
    "attn_res": attn_res.attn_res,
    "output_mix": attn_res.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "mla_query": mla.mla_query,
    "mla_attend": mla.mla_attend,
    "mla_attend_dcp": mla_dcp.mla_attend_dcp,
    "mla_value": mla.mla_value,
    "moe_front": moe.moe_front,
    "route": moe.route,
    "experts": moe.experts,
    "shared_expert": moe.shared_expert,
    "moe_tail": moe.moe_tail,
}
"""The specialised path's ops by name: decode only, so it has no `*_sequence` forms."""
