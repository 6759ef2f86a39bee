"""Where vLLM 0.33's generic K3 path and ours round differently by contract, op by op: read from both sources."""

from __future__ import annotations

KNOWN = (
    (
        "matrix products",
        "BF16 tensor cores, FP32 sums in cuBLAS's order, split by shape",
        "FP32 products of BF16 numbers; same final rounding, another order of sums",
        "rounding of the last bit",
    ),
    (
        "AttnRes",
        "one Triton kernel: online softmax over tiles of 1 or 4 sources, mixture in FP32 until the output norm",
        "softmax over all sources at once, mixture in FP32 until the output norm",
        "order of FP32 sums",
    ),
    (
        "KDA decode",
        "4 heads have no native kernel: Triton, convolution output to BF16, FP32 state, output to BF16 before the norm",
        "the same roundings",
        "order of FP32 sums; 1/sqrt against division by a root",
    ),
    (
        "KDA prefill",
        "FlashKDA: chunks with BF16 operands (keys, queries, corrections) on tensor cores",
        "chunks of 16 in FP32",
        "BF16 roundings inside a chunk: by design, prefill view only (and the prompt of the decode view)",
    ),
    (
        "MLA decode",
        "absorbed query to BF16; softmax weights to BF16 before they meet the values; merge of splits in FP32",
        "absorbed query to BF16; softmax weights stay FP32",
        "one BF16 rounding of each weight",
    ),
    (
        "MLA prefill",
        "keys and values expanded by kv_b_proj to BF16, FlashAttention 3 on them",
        "absorbed attention on the latent cache, as in decode",
        "other BF16 roundings (k_nope, v instead of the absorbed query and the latent): by design, prefill view only",
    ),
    (
        "output gate of MLA",
        "value to BF16, times sigmoid(gate) in one compiled kernel",
        "value to BF16, times sigmoid(gate) in FP32, one rounding",
        "at most sigmoid(gate) to BF16 if the compiler keeps it there",
    ),
    (
        "router",
        "FP32 logits from BF16 operands; weights renormalised in FP32",
        "the same",
        "order of FP32 sums: near-tied experts may change sides",
    ),
    (
        "experts, first product",
        "gate and up to BF16 before SiTU (Marlin and Triton alike)",
        "SiTU on FP32 sums",
        "one BF16 rounding of gate and of up",
    ),
    (
        "experts, weighted sum",
        "Marlin: slot result and weight to BF16, their product to BF16 (Triton: product in FP32, to BF16); the sum over"
        " slots to BF16 after every addition",
        "slot result to BF16, times its FP32 weight, summed over slots in FP32, one rounding",
        "BF16 roundings of the weight, the product and every partial sum",
    ),
    (
        "latent tail",
        "norm to BF16, up projection to BF16, plus the shared expert to BF16",
        "the same",
        "order of FP32 sums",
    ),
    ("head", "BF16 logits", "BF16 logits", "rounding of the last bit"),
)
"""(op, vLLM, ours, what can differ)."""
