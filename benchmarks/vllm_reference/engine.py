"""vLLM's own engine on a K3-family checkpoint, in this process, with what version 0.33 needs on a Hopper GPU.

Nothing here imports vLLM before `prepare` has set the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: modules can be hooked, and requests of a call start together
    "VLLM_KIMI_K3_GEMM_AR": "0",  # needs the cutlass package, and several ranks
    "VLLM_ENABLE_GEMM_RS": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MAX_LENGTH, MAX_REQUESTS = 2048, 32
MAX_STEP_TOKENS = 8192
"""At least all prompts of one call: one that is cut into chunks needs context kernels of a fixed latent width."""
CACHE_BYTES = 4 << 30

EPILOGUES = ("fused_mla_key_concat_kv_cache_insert", "fused_mla_decode_q_concat_kv_cache_insert")


def prepare() -> None:
    """Set the environment, unless it is set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start(folder: Path, eager: bool) -> Any:
    """vLLM's `LLM` on a checkpoint folder: BF16 weights and KV cache, FP32 KDA state, raw logits, no prefix reuse."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        kv_cache_dtype="auto",
        mamba_ssm_cache_dtype="float32",
        enforce_eager=eager,
        enable_prefix_caching=False,
        enable_trace_replay=True,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        seed=0,
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        kv_cache_memory_bytes=CACHE_BYTES,
        gpu_memory_utilization=0.5,
        disable_log_stats=True,
    )


def epilogue_refusal(nope: int, rope: int, latent: int) -> str | None:
    """Why vLLM's fused MLA epilogues (concatenation and cache write) refuse these sizes; None if they take them."""
    import vllm._custom_ops  # noqa: F401  registers the ops

    def empty(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")

    row, slots = latent + rope, torch.zeros(1, dtype=torch.int64, device="cuda")
    try:
        torch.ops._C.fused_kimi_k3_mla_key_concat_kv_cache_insert(
            empty(1, 4, nope + rope), empty(1, 4, nope), empty(1, rope), empty(1, latent),
            empty(1, 4, nope + rope), empty(2, 16, row), slots, 16, None, None,
        )  # fmt: skip
        torch.ops._C.fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(
            empty(1, 4, latent), empty(1, 4, rope), empty(1, latent), empty(1, rope),
            empty(1, 4, row), empty(2, 16, row), slots, 16, None, None,
        )  # fmt: skip
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _insert(cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Write rows `[latent | rope]` at flat `slots` of a paged cache; negative slots are skipped."""
    rows, live = torch.cat([latent, rope], dim=-1), slots >= 0
    slots = slots[live]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[live].to(cache.dtype)


def _key_epilogue(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: None = None,
    cos_sin_cache: None = None,
) -> Tensor:
    """The prefill epilogue as copies, for any width: keys `[k_nope | k_pe]` per head, latent rows into the cache."""
    assert (positions, cos_sin_cache) == (None, None), "the target model's MLA has no rotation"
    rope = k_pe.reshape(k_pe.shape[0], -1)
    _insert(kv_cache, slot_mapping, kv_c_normed, rope)
    return torch.cat([k_nope, rope[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1)


def _query_epilogue(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: None = None,
    cos_sin_cache: None = None,
) -> Tensor:
    """The decode epilogue as copies, for any width: queries `[ql_nope | q_pe]`, latent rows into the cache."""
    assert (positions, cos_sin_cache) == (None, None), "the target model's MLA has no rotation"
    _insert(kv_cache, slot_mapping, kv_c_normed, k_pe.reshape(k_pe.shape[0], -1))
    return torch.cat([ql_nope, q_pe], dim=-1)


def use_copies_as_epilogues() -> None:
    """Put plain copies in the place of the two fused epilogues. They move BF16 numbers and compute nothing."""
    from vllm.models.kimi_k3.nvidia import mla

    for name, copy in zip(EPILOGUES, (_key_epilogue, _query_epilogue), strict=True):
        if not hasattr(mla, name):
            raise AttributeError(f"vllm.models.kimi_k3.nvidia.mla has no {name}: not the version this is for")
        setattr(mla, name, copy)


def use_softmax_scale(scale: float) -> None:
    """Build every K3 MLA layer with this softmax scale instead of the one of its (padded) query width."""
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    build = MultiHeadLatentAttention.__init__

    def scaled(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for part in (self, self.impl, self.prefill_backend):
            assert hasattr(part, "scale"), f"{type(part).__name__} has no scale: not the version this is for"
            part.scale = scale

    MultiHeadLatentAttention.__init__ = scaled


def choices(model: Any) -> dict[str, Any]:
    """Which kernels vLLM chose, read off the built model."""
    found: dict[str, Any] = {}
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if hasattr(attention, "impl"):
            found["MLA decode"] = attention.attn_backend.get_name()
            found["MLA prefill"] = attention.prefill_backend.get_name()
            found["MLA cache"] = [str(attention.kv_cache.dtype), list(attention.kv_cache.shape)]
            found["MLA softmax scale"] = attention.impl.scale
        else:
            found["KDA decode"], found["KDA prefill"] = attention.kda_decode_backend, attention.kda_prefill_backend
            found["KDA state"] = [str(dtype) for dtype in attention.get_state_dtype()[:2]]
        if index and hasattr(layer.mlp, "experts"):
            method = layer.mlp.experts.routed_experts.quant_method
            backend = getattr(method, "mxfp4_backend", None) or getattr(method, "unquantized_backend", None)
            found["experts"] = [type(method).__name__, str(getattr(backend, "value", backend))]
            config = layer.mlp.experts.moe_config
            found["experts padded to"] = [config.hidden_dim, config.intermediate_size_per_partition]
    return found
