"""Inputs of every op at K3's true shard sizes, made on the device that measures.

Random codes and unit-variance values: what a kernel's time depends on is which bytes it touches, not what they say. Ids
are drawn over all experts that are held, so that the expert weights a step reads are as many as in a spread routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode_impl.mxfp4 import MXFP4Weight

SHARDS = (8, 16)
HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
HEAD, Q_RANK, KV_RANK, ROPE, NOPE, BLOCKS = 128, 1536, 512, 64, 128, 8
PAGE, CONTEXT, MAX_CONTEXT, WIDTH = 64, 4096, 8192, 8
"""Tokens of a page, keys that every row sees, keys that its block table holds, tokens of a verify request."""


def heads_of(ranks: int) -> int:
    """Attention heads of one rank, KDA's and MLA's alike."""
    return 96 // ranks


def case_of(op: str, ranks: int, rows: int, device: str, seed: int = 0) -> dict[str, Any]:
    """One case of `op` for one rank of `ranks` at `rows` rows; sums over ranks see one partial."""
    return _BUILDERS[op](_Draw(device, seed), ranks, rows)


class _Draw:
    """Random tensors on a device; on the CPU they stay unwritten, where only their shapes matter."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.generator = device, None
        if device != "cpu":
            self.generator = torch.Generator(device).manual_seed(seed)

    def bf16(self, *shape: int, std: float = 1.0) -> Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return x if self.generator is None else x.normal_(0.0, std, generator=self.generator)

    def f32(self, *shape: int, std: float = 1.0) -> Tensor:
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x if self.generator is None else x.normal_(0.0, std, generator=self.generator)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        x = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return x if self.generator is None else x.random_(low, high, generator=self.generator)

    def distinct(self, rows: int, k: int, of: int) -> Tensor:
        """i64 [rows, k], distinct in a row."""
        return self.f32(rows, of).nan_to_num().argsort(-1)[:, :k].contiguous()


def _projection(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    outputs = (4 * heads_of(ranks) + 1) * HEAD + heads_of(ranks)
    return {"x": d.bf16(rows, HIDDEN), "weight": d.bf16(outputs, HIDDEN, std=HIDDEN**-0.5)}


def _rms_norm(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    return {"x": d.bf16(rows, HIDDEN), "weight": d.bf16(HIDDEN), "eps": 1e-5}


def _all_reduce(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    return {f"y.{r}": d.bf16(rows, HIDDEN) for r in range(ranks)}


def _attn_res(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    names = ("norm_weight", "query_weight", "out_norm_weight")
    return {
        "prefix": d.bf16(rows, HIDDEN),
        "delta": d.bf16(rows, HIDDEN),
        "blocks": d.bf16(rows, BLOCKS, HIDDEN),
        "num_blocks": BLOCKS,
        "eps": 1e-5,
        **{name: d.bf16(HIDDEN) for name in names},
    }


def _output_mix(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    case = _attn_res(d, ranks, rows)
    del case["delta"]
    size = heads_of(ranks) * HEAD
    return {**case, "y.0": d.bf16(rows, size), "weight.0": d.bf16(HIDDEN, size), "replace_prefix": False}


def _kda(d: _Draw, ranks: int, tokens: int, slots: int) -> dict[str, Any]:
    h = heads_of(ranks)
    size = h * HEAD
    return {
        "proj": d.bf16(tokens, 4 * size + HEAD + h),
        "f_b": d.bf16(size, HEAD, std=HEAD**-0.5),
        "conv_weight": d.f32(3 * size, 4),
        "A_log": d.f32(h),
        "dt_bias": d.f32(size),
        "lower_bound": -5.0,
        "norm_weight": d.bf16(HEAD),
        "conv_state": d.bf16(slots, 3 * size, 3),
        "state": d.f32(slots, h, HEAD, HEAD),
    }


def _kda_step(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    return {**_kda(d, ranks, rows, rows + 1), "slots": 1 + torch.arange(rows, device=d.device)}


def _kda_verify(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    requests = max(1, rows // WIDTH)
    targets = 1 + torch.arange(requests * WIDTH, device=d.device).view(requests, WIDTH)
    case = _kda(d, ranks, requests * WIDTH, requests * WIDTH + 1)
    return {**case, "sources": targets[:, 0].contiguous(), "targets": targets}


def _mla_query(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    h = heads_of(ranks)
    return {
        "a": d.bf16(rows, Q_RANK + KV_RANK + ROPE),
        "q_norm_weight": d.bf16(Q_RANK),
        "kv_norm_weight": d.bf16(KV_RANK),
        "eps": 1e-5,
        "q_b": d.bf16(h * (NOPE + ROPE), Q_RANK, std=Q_RANK**-0.5),
        "w_uk": d.bf16(h, NOPE, KV_RANK, std=NOPE**-0.5),
        "q_scale": 0.8,
        "k_scale": 0.7,
        "cache": torch.zeros(rows + 1, PAGE, KV_RANK + ROPE, dtype=torch.uint8, device=d.device),
        "positions": (1 + torch.arange(rows, device=d.device)) * PAGE,
    }


def _mla_attend(d: _Draw, ranks: int, rows: int, dtype: torch.dtype = torch.uint8) -> dict[str, Any]:
    pages, width = MAX_CONTEXT // PAGE, KV_RANK + ROPE
    used = CONTEXT // PAGE
    table = torch.zeros(rows, pages, dtype=torch.int64, device=d.device)
    table[:, :used] = 1 + torch.arange(rows * used, device=d.device).view(rows, used)
    shapes = {"q": (rows, heads_of(ranks), width), "cache": (rows * used + 1, PAGE, width)}
    # Bytes below the NaN code.
    make = d.bf16 if dtype == torch.bfloat16 else lambda *shape: d.bytes(*shape, high=0x70)
    return {
        **{name: make(*shape) for name, shape in shapes.items()},
        "block_table": table,
        "lengths": torch.full((rows,), CONTEXT, device=d.device),
        "softmax_scale": (NOPE + ROPE) ** -0.5,
        "q_scale": 0.8,
        "k_scale": 0.7,
        "kv_rank": KV_RANK,
    }


def _mla_attend_dcp(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    """All heads over the contexts of all ranks: each holds as many pages as it has tokens for."""
    case = _mla_attend(d, 1, rows)
    own, entries = case["cache"], -(-case["block_table"].shape[1] // ranks)
    used = -(-CONTEXT // (PAGE * ranks))
    table = torch.zeros(rows, entries, dtype=torch.int64, device=d.device)
    table[:, :used] = 1 + torch.arange(rows * used, device=d.device).view(rows, used)
    pools = {f"cache.{rank}": own[: rows * used + 1] for rank in range(ranks)}
    return {**{name: value for name, value in case.items() if name != "cache"}, **pools, "block_table": table}


def _mla_value(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    h = heads_of(ranks)
    return {
        "latent": d.bf16(rows, h, KV_RANK),
        "w_uv": d.bf16(h, KV_RANK, HEAD, std=KV_RANK**-0.5),
        "gate": d.bf16(rows, h * HEAD),
    }


def _moe_front(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    std = HIDDEN**-0.5
    return {
        "x": d.bf16(rows, HIDDEN),
        "gate_weight": d.bf16(EXPERTS, HIDDEN, std=std),
        "down_weight": d.bf16(LATENT, HIDDEN, std=std),
    }


def _route(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    return {"logits": d.f32(rows, EXPERTS), "bias": d.f32(EXPERTS, std=0.1), "top_k": TOP_K, "scaling": 1.0}


def _experts(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    width = 3072 // ranks
    middle = {"low": 116, "high": 121}
    return {
        "z": d.bf16(rows, LATENT),
        "ids": d.distinct(rows, TOP_K, EXPERTS),
        "weights": torch.full((rows, TOP_K), 1 / TOP_K, device=d.device),
        "w13_packed": d.bytes(EXPERTS, 2 * width, LATENT // 2),
        "w13_scale": d.bytes(EXPERTS, 2 * width, LATENT // 32, **middle),
        "w2_packed": d.bytes(EXPERTS, LATENT, width // 2),
        "w2_scale": d.bytes(EXPERTS, LATENT, width // 32, **middle),
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def _shared_expert(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    width = 6144 // ranks
    return {
        "x": d.bf16(rows, HIDDEN),
        "gate_up": d.bf16(2 * width, HIDDEN, std=HIDDEN**-0.5),
        "down": d.bf16(HIDDEN, width, std=width**-0.5),
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def _moe_tail(d: _Draw, ranks: int, rows: int) -> dict[str, Any]:
    return {
        "latent.0": d.bf16(rows, LATENT),
        "shared.0": d.bf16(rows, HIDDEN),
        "norm_weight": d.bf16(LATENT),
        "up_weight": d.bf16(HIDDEN, LATENT, std=LATENT**-0.5),
        "eps": 1e-5,
    }


_BUILDERS = {
    "projection": _projection,
    "rms_norm": _rms_norm,
    "all_reduce": _all_reduce,
    "attn_res": _attn_res,
    "output_mix": _output_mix,
    "kda_step": _kda_step,
    "kda_verify": _kda_verify,
    "mla_query": _mla_query,
    "mla_attend": _mla_attend,
    "mla_attend_dcp": _mla_attend_dcp,
    "mla_value": _mla_value,
    "moe_front": _moe_front,
    "route": _route,
    "experts": _experts,
    "shared_expert": _shared_expert,
    "moe_tail": _moe_tail,
}


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """A case as an op takes it: dotted groups as lists, codes and scales as one weight, made once."""
    inputs: dict[str, Any] = {}
    for key, value in case.items():
        stem, _, index = key.rpartition(".")
        if stem and index.isdigit():
            inputs.setdefault(stem, []).append(value)
        elif key.endswith("_packed"):
            name = key.removesuffix("_packed")
            inputs[name] = MXFP4Weight(value, case[f"{name}_scale"])
        elif f"{key.removesuffix('_scale')}_packed" not in case:
            inputs[key] = value
    return inputs
