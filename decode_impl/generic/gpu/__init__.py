"""The generic path's form for CUDA devices: what a careful general implementation runs, and nothing fused beyond it.

Linear layers and per-head products go through cuBLAS in BF16; norms, activations, gates, the router, the convolution,
the delta rule, attention and the grouped expert products are Triton kernels. Contracts and roundings are those of the
plain ops (`decode_impl/generic/*.py`), which stay the reference and still serve attention and KDA of prompts. No op
reads a value on the host, so that a step can be captured in a CUDA graph. This is the baseline that the specialised
path's speed is measured against (`decodegate bench`). Importing it needs Triton.
"""

from decode_impl import generic
from decode_impl.generic.gpu import attention, attn_res, experts, kda, linear, mla, route
from decode_impl.ops import OpTable

linear.exact_products()

OPS: OpTable = {
    **generic.OPS,
    "projection": linear.projection,
    "rms_norm": linear.rms_norm,
    "attn_res": attn_res.attn_res,
    "output_mix": attn_res.output_mix,
    "kda_step": kda.kda_step,
    "kda_verify": kda.kda_verify,
    "mla_query": mla.mla_query,
    "mla_attend": attention.mla_attend,
    "mla_value": mla.mla_value,
    "moe_front": linear.moe_front,
    "route": route.route,
    "experts": experts.experts,
    "shared_expert": linear.shared_expert,
    "moe_tail": linear.moe_tail,
}
"""The plain table with the ops of a decode step replaced; `*_sequence` ops and sums over ranks are the plain ones."""
