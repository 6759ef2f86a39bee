"""Upstream's specialised decode of Kimi K3 (vLLM 0.33), NVIDIA and AMD forms: their conditions and their steps.

Read from the source of the release, not from its documentation, which names fewer. The release reports the first unmet
condition only; here all of them are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from validation.fit.conditions import Check, Kind, Unmet, unmet
from validation.fit.deployment import DeploymentFile
from validation.fit.hardware import GPUS

_MODEL = {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
}
"""Fields of `config.json` that the release checks."""

_BUILDERS = {"hidden_size": 7168, "num_shared_experts": 2, "first_k_dense_replace": 1}
"""Fields that its builders take for granted."""

_MAX_ROWS = 64
_MAX_DRAFTS = 7
_SCOPE_DRAFTS = range(3, 8)
_AMD_ROWS = 8
_DEFAULT_CAPTURES = (1, 2, 4, *range(8, 513, 8))
"""vLLM's default sizes of captured graphs, as far as they matter here."""


def nvidia(given: DeploymentFile, model: Mapping[str, Any]) -> list[Unmet]:
    """Unmet conditions of the NVIDIA form."""
    gpu = GPUS[given.hardware.gpu]
    found = unmet(Kind.REFUSED, _nvidia_checked(given, model))
    found += unmet(Kind.ASSUMED, _nvidia_assumed(given, model))
    scope: list[Check] = [
        (
            given.hardware.gpu == "GB300" or gpu.capability is None or gpu.capability[0] != 10,
            f"GPU is {given.hardware.gpu}, the stated scope is GB300",
        ),
        (
            given.drafts in (0, *_SCOPE_DRAFTS) or given.drafts > _MAX_DRAFTS,
            f"{given.drafts} drafts, the stated scope is none or 3 to 7",
        ),
    ]
    return found + unmet(Kind.SCOPE, scope)


def _nvidia_checked(given: DeploymentFile, model: Mapping[str, Any]) -> list[Check]:
    gpu, ranks, engine, speculation = GPUS[given.hardware.gpu], given.parallel, given.engine, given.speculation
    family = f"GPU is {given.hardware.gpu}, the SM100 family (GB300, B300, GB200, B200) is needed"
    return [
        (gpu.capability is not None and gpu.capability[0] == 10, family),
        *((model[name] == value, f"{name} is {model[name]}, {value} is needed") for name, value in _MODEL.items()),
        (ranks.tensor in (8, 16), f"tensor parallelism is {ranks.tensor}, 8 or 16 is needed"),
        (ranks.pipeline == 1, f"pipeline parallelism is {ranks.pipeline}, 1 is needed"),
        (not ranks.expert, "expert parallelism is on, it must be off"),
        (not engine.dual_batch_overlap, "dual batch overlap is on, it must be off"),
        (
            ranks.decode_context in (1, ranks.tensor),
            f"decode context parallelism is {ranks.decode_context}, 1 or {ranks.tensor} (all tensor ranks) is needed",
        ),
        (not engine.sleep_mode, "sleep mode is on, it must be off"),
        (not engine.lora, "LoRA is on, it must be off"),
        (engine.runner == "v2", f"model runner is {engine.runner}, v2 is needed"),
        (not engine.stock_torch_compile, "compilation is stock torch.compile, another mode is needed"),
        (engine.cuda_graphs == "full", f"CUDA graphs are {engine.cuda_graphs}, full decode graphs are needed"),
        (
            speculation is None or speculation.method == "dspark",
            f"speculation is {speculation.method if speculation else 'none'}, only dspark or none is supported",
        ),
        (speculation is None or not speculation.adaptive, "adaptive verification is on, it must be off"),
        (
            (given.cache.conv_state, given.cache.recurrent_state) == ("bf16", "fp32"),
            f"KDA states are {given.cache.conv_state} (conv) and {given.cache.recurrent_state} (recurrent), "
            "bf16 and fp32 are needed",
        ),
        (not engine.replay_ssm, "ReplaySSM is on, it must be off"),
        (given.drafts <= _MAX_DRAFTS, f"{given.drafts} drafts, at most {_MAX_DRAFTS} are supported"),
        (
            speculation is None or not engine.aux_attn_res_stream,
            "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM is on, it must be off with speculation",
        ),
    ]


def _nvidia_assumed(given: DeploymentFile, model: Mapping[str, Any]) -> list[Check]:
    domain, ranks = given.hardware.nvlink_domain, given.parallel.tensor
    return [
        *((model[name] == value, f"{name} is {model[name]}, {value} is needed") for name, value in _BUILDERS.items()),
        (given.cache.kv == "fp8", f"KV cache is {given.cache.kv}, the kernels always write fp8 rows"),
        (
            ranks == 1 or domain >= ranks,
            f"the NVLink domain has {domain} GPUs, multicast over all {ranks} tensor ranks is needed",
        ),
    ]


def amd(given: DeploymentFile, model: Mapping[str, Any]) -> list[Unmet]:
    """Unmet conditions of the AMD form, as far as the release's own notes state them."""
    checks: list[Check] = [
        (given.hardware.gpu == "MI355X", f"GPU is {given.hardware.gpu}, MI355X is needed"),
        (given.parallel.tensor == 8, f"tensor parallelism is {given.parallel.tensor}, 8 is needed"),
        (given.speculation is not None, "no speculation, the AMD form runs only with it"),
    ]
    factor = model["routed_scaling_factor"]
    checks.append((factor == 1.0, f"routed_scaling_factor is {factor}, 1.0 is needed"))
    hidden = model["hidden_size"]
    return unmet(Kind.REFUSED, checks) + unmet(
        Kind.ASSUMED, [(hidden == _BUILDERS["hidden_size"], f"hidden_size is {hidden}, 7168 is needed")]
    )


def nvidia_fallback(given: DeploymentFile, requests: int) -> str | None:
    """Why a decode step of so many requests runs generic in the NVIDIA form; None where it is specialised.

    A step is padded to a captured graph; graphs are specialised for 1 to 8, 16, 32 and 64 rows and for every captured
    size to 64, rounded up to whole requests.
    """
    width = 1 + given.drafts
    rows = requests * width
    captured = given.engine.capture_sizes or _DEFAULT_CAPTURES
    padded = min((size for size in (-(-c // width) * width for c in captured) if size >= rows), default=None)
    if padded is None:
        return "more rows than any captured graph"
    if padded > _MAX_ROWS:
        return f"more than {_MAX_ROWS} rows after padding to a captured graph"
    return None


def amd_fallback(given: DeploymentFile, requests: int) -> str | None:
    """Why a decode step of so many requests runs generic in the AMD form; None where it is specialised."""
    return None if requests * (1 + given.drafts) <= _AMD_ROWS else f"more than {_AMD_ROWS} rows"
