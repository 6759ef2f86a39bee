"""The generic path (`auto`): one plain function per op, written to be read, on CPU and CUDA."""

from decode_impl.generic import attn_res, kda, linear, mla, mla_dcp, moe
from decode_impl.ops import OpTable

OPS: OpTable = {
    "projection": linear.projection,
    "rms_norm": linear.rms_norm,
    "all_reduce": attn_res.all_reduce,
    "attn_res": attn_res.attn_res,
    "output_mix": attn_res.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "kda_sequence": kda.kda_sequence,
    "mla_query": mla.mla_query,
    "mla_attend": mla.mla_attend,
    "mla_attend_dcp": mla_dcp.mla_attend_dcp,
    "mla_attend_sequence": mla.mla_attend_sequence,
    "mla_value": mla.mla_value,
    "moe_front": moe.moe_front,
    "route": moe.route,
    "experts": moe.experts,
    "shared_expert": moe.shared_expert,
    "moe_tail": moe.moe_tail,
}
"""The generic path's ops by name."""
