"""The right answer for every example deployment: exit code, and every unmet condition by path."""

from __future__ import annotations

NVIDIA, AMD, OWN = "upstream, NVIDIA", "upstream, AMD", "decodegate's own"
RANKS_8, RANKS_16 = "8 GPUs a replica, all ranks run on 1 device", "16 GPUs a replica, all ranks run on 1 device"
NOT_AMD = "GPU is GB300, MI355X is needed"
TP_16 = "tensor parallelism is 16, 8 is needed"
NO_DRAFTS = "no speculation, the AMD form runs only with it"
NOT_SM100 = "the SM100 family (GB300, B300, GB200, B200) is needed"

EXPECTED: dict[str, tuple[int, dict[str, set[str]]]] = {
    "gb300-tp16-dspark": (0, {NVIDIA: set(), AMD: {NOT_AMD, TP_16}, OWN: {RANKS_16}}),
    "gb300-tp8-batch64": (0, {NVIDIA: set(), AMD: {NOT_AMD, NO_DRAFTS}, OWN: {RANKS_8}}),
    "gb300-tp16-long-context": (
        0,
        {NVIDIA: set(), AMD: {NOT_AMD, TP_16}, OWN: {RANKS_16}},
    ),
    "mi355x-tp8-dspark": (
        0,
        {
            NVIDIA: {
                f"GPU is MI355X, {NOT_SM100}",
                "the NVLink domain has 0 GPUs, multicast over all 8 tensor ranks is needed",
            },
            AMD: set(),
            OWN: {"GPU is MI355X, the fused kernels need CUDA capability 9.0 or more", RANKS_8},
        },
    ),
    "h200-k3-mini": (
        0,
        {
            NVIDIA: {
                f"GPU is H200, {NOT_SM100}",
                "num_experts is 16, 896 is needed",
                "num_experts_per_token is 4, 16 is needed",
                "tensor parallelism is 1, 8 or 16 is needed",
                "hidden_size is 192, 7168 is needed",
                "num_shared_experts is 1, 2 is needed",
            },
            AMD: {
                "GPU is H200, MI355X is needed",
                "tensor parallelism is 1, 8 is needed",
                "hidden_size is 192, 7168 is needed",
            },
            OWN: set(),
        },
    ),
    "h200-tp16": (
        1,
        {
            NVIDIA: {
                f"GPU is H200, {NOT_SM100}",
                "KV cache is bf16, the kernels always write fp8 rows",
                "the NVLink domain has 8 GPUs, multicast over all 16 tensor ranks is needed",
            },
            AMD: {"GPU is H200, MI355X is needed", TP_16, NO_DRAFTS},
            OWN: {RANKS_16},
        },
    ),
    "gb200-tp16": (
        3,
        {
            NVIDIA: {"GPU is GB200, the stated scope is GB300", "2 drafts, the stated scope is none or 3 to 7"},
            AMD: {"GPU is GB200, MI355X is needed", TP_16},
            OWN: {"drafts is 2, allowed are 0 and 3 to 7", RANKS_16},
        },
    ),
    "gb300-everything-on": (
        1,
        {
            NVIDIA: {
                "tensor parallelism is 4, 8 or 16 is needed",
                "pipeline parallelism is 2, 1 is needed",
                "expert parallelism is on, it must be off",
                "dual batch overlap is on, it must be off",
                "decode context parallelism is 2, 1 or 4 (all tensor ranks) is needed",
                "sleep mode is on, it must be off",
                "LoRA is on, it must be off",
                "model runner is v1, v2 is needed",
                "compilation is stock torch.compile, another mode is needed",
                "CUDA graphs are piecewise, full decode graphs are needed",
                "speculation is eagle, only dspark or none is supported",
                "adaptive verification is on, it must be off",
                "KDA states are fp32 (conv) and bf16 (recurrent), bf16 and fp32 are needed",
                "ReplaySSM is on, it must be off",
                "8 drafts, at most 7 are supported",
                "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM is on, it must be off with speculation",
                "KV cache is bf16, the kernels always write fp8 rows",
            },
            AMD: {NOT_AMD, "tensor parallelism is 4, 8 is needed"},
            OWN: {
                "recurrent state is bf16, f32 is needed (a narrower state drifts)",
                "drafts is 8, allowed are 0 and 3 to 7",
                RANKS_8,
                "decode context parallelism is 2, 1 or 4 (all tensor ranks) is needed",
                "pipeline parallelism is 2, there is none",
                "expert parallelism is on, there is none",
                "conv state is fp32, it is always bf16",
                "LoRA is on, there is none",
                "speculation is eagle, only dspark or none is supported",
            },
        },
    ),
    "gb300-large-batches": (
        1,
        {
            NVIDIA: set(),
            AMD: {NOT_AMD, TP_16, NO_DRAFTS},
            OWN: {"max batch is 256, at most 64 requests can decode specialised", RANKS_16},
        },
    ),
    "gb300-two-domains": (
        1,
        {
            NVIDIA: {
                "contexts to 2000000 tokens, the model has 1048576",
                "KDA states are bf16 (conv) and bf16 (recurrent), bf16 and fp32 are needed",
                "9 drafts, at most 7 are supported",
                "the NVLink domain has 8 GPUs, multicast over all 16 tensor ranks is needed",
            },
            AMD: {"contexts to 2000000 tokens, the model has 1048576", NOT_AMD, TP_16},
            OWN: {
                "contexts to 2000000 tokens, the model has 1048576",
                "recurrent state is bf16, f32 is needed (a narrower state drifts)",
                "drafts is 9, allowed are 0 and 3 to 7",
                RANKS_16,
            },
        },
    ),
}
