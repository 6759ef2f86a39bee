"""What the specialised path demands of a model and its deployment. A refusal lists every reason, not the first."""

from __future__ import annotations

from decode_impl.config import ModelConfig
from decode_impl.deployment import Deployment
from decode_impl.specialized.contract import MAX_DRAFTS, MAX_ROWS, MIN_DRAFTS

_TENSOR_PARALLEL = (1, 2, 4, 8, 16)
_HEAD_DIM = 128
_CONV_KERNEL = 4
_SITU = (4.0, 25.0)
_MAX_TOP_K = 16
_PAGE_SIZES = (16, 32, 64, 128)


def unsupported(config: ModelConfig, deployment: Deployment) -> list[str]:
    """Every reason why `latency_specialized` cannot run this model in this deployment; empty where it can."""
    checks = [
        (config.kda_head_dim == _HEAD_DIM, f"KDA head size is {config.kda_head_dim}, {_HEAD_DIM} is needed"),
        (
            config.conv_kernel == _CONV_KERNEL,
            f"conv kernel is {config.conv_kernel}, {_CONV_KERNEL} is needed",
        ),
        (
            (config.situ_beta, config.situ_linear_beta) == _SITU,
            f"SiTU betas are {config.situ_beta} and {config.situ_linear_beta}, {_SITU[0]} and {_SITU[1]} are needed",
        ),
        (
            config.experts_per_token <= _MAX_TOP_K,
            f"{config.experts_per_token} experts per token, at most {_MAX_TOP_K} are allowed",
        ),
        (config.hidden_size % 32 == 0, f"hidden size is {config.hidden_size}, a multiple of 32 is needed"),
        (
            config.first_dense_layers <= 1,
            f"{config.first_dense_layers} dense layers, only the first layer may be dense",
        ),
        (
            deployment.state_dtype == "f32",
            f"recurrent state is {deployment.state_dtype}, f32 is needed (a narrower state drifts)",
        ),
        (
            deployment.tensor_parallel in _TENSOR_PARALLEL,
            f"tensor parallelism is {deployment.tensor_parallel}, allowed are {_TENSOR_PARALLEL}",
        ),
        (
            deployment.max_batch <= MAX_ROWS,
            f"max batch is {deployment.max_batch}, at most {MAX_ROWS} requests can decode specialised",
        ),
        (
            deployment.drafts == 0 or MIN_DRAFTS <= deployment.drafts <= MAX_DRAFTS,
            f"drafts is {deployment.drafts}, allowed are 0 and {MIN_DRAFTS} to {MAX_DRAFTS}",
        ),
        (
            deployment.page_size in _PAGE_SIZES,
            f"page size is {deployment.page_size}, allowed are {_PAGE_SIZES}",
        ),
    ]
    return [reason for holds, reason in checks if not holds]
