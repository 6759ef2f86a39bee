"""Faults of one shape alone: the kernel for a number of heads, ranks, blocks, keys or experts at one batch bin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("one shape alone", kind=Kind.ONE_BIN, missed_by="every other shape; one shape at each batch bin")

Where = Callable[..., bool]

PLACES: tuple[tuple[str, str, str, str, Where], ...] = (
    ("kda_step", "kda-twelve-heads-at-16", "12 heads at 16 rows", "kind of M26",
     lambda slots, state, **_: slots.shape[0] == 16 and state.shape[1] == 12),
    ("kda_verify", "verify-six-heads-at-32", "6 heads in verify steps of the bin of 32 rows", "kind of M14",
     lambda proj, state, **_: 16 < proj.shape[0] <= 32 and state.shape[1] == 6),
    ("kda_step", "kda-twelve-heads-of-128", "12 heads of 128, a rank's of eight", "kind of M26",
     lambda state, **_: state.shape[1] == 12 and state.shape[-1] == 128),
    ("kda_step", "kda-heads-of-128-from-32", "more than one head of 128 from 32 rows on", "kind of M59",
     lambda slots, state, **_: slots.shape[0] >= 32 and state.shape[1] > 1 and state.shape[-1] == 128),
    ("kda_verify", "verify-8-by-8", "8 requests of 8 tokens", "kind of M59",
     lambda targets, **_: tuple(targets.shape) == (8, 8)),
    ("kda_verify", "verify-16-by-4-of-128", "16 requests of 4 tokens, heads of 128", "kind of M59",
     lambda targets, state, **_: tuple(targets.shape) == (16, 4) and state.shape[-1] == 128),
    ("kda_verify", "verify-12-by-5", "12 requests of 5 tokens", "kind of M59",
     lambda targets, **_: tuple(targets.shape) == (12, 5)),
    ("mla_attend_dcp", "dcp-all-heads", "more than 12 heads", "kind of M26",
     lambda q, **_: q.shape[1] > 12),
    ("mla_attend_dcp", "dcp-eight-ranks-from-32", "8 ranks at 32 rows and more", "kind of M59",
     lambda q, cache, **_: len(cache) >= 8 and q.shape[0] >= 32),
    ("mla_attend_dcp", "dcp-eight-ranks-at-64", "8 ranks and 12 heads at 64 rows", "kind of M59",
     lambda q, cache, **_: (len(cache), *q.shape[:2]) == (8, 64, 12)),
    ("projection", "projection-from-512-inputs", "512 inputs and more", "kind of M59",
     lambda x, **_: x.shape[1] >= 512),
    ("mla_attend", "mla-twelve-heads-at-8", "12 heads at 8 rows", "kind of M26",
     lambda q, **_: q.shape[:2] == (8, 12)),
    ("mla_attend", "mla-from-1024-keys", "requests of 1,024 keys and more", "kind of M16",
     lambda lengths, **_: int(lengths.max()) >= 1024),
    ("mla_query", "mla-query-twelve-heads-at-32", "12 heads at 32 rows", "kind of M26",
     lambda a, w_uk, **_: (a.shape[0], w_uk.shape[0]) == (32, 12)),
    ("all_reduce", "reduce-two-ranks-at-16", "two ranks at 16 rows", "kind of M59",
     lambda y, **_: len(y) == 2 and y[0].shape[0] == 16),
    ("moe_tail", "moe-tail-sixteen-ranks-at-8", "16 ranks at 8 rows", "kind of M59",
     lambda latent, **_: len(latent) == 16 and latent[0].shape[0] == 8),
    ("attn_res", "attn-res-five-blocks", "five residual blocks", "kind of M54",
     lambda num_blocks, **_: num_blocks == 5),
    ("experts", "moe-ids-from-32", "experts from the 33rd on", "kind of M40",
     lambda ids, **_: bool((ids >= 32).any())),
    ("experts", "moe-from-512-pairs", "more than 512 pairs of row and expert", "kind of M50",
     lambda ids, **_: ids.numel() > 512),
    ("shared_expert", "moe-shared-wide-at-16", "a shared expert of more than 192 at 16 rows", "kind of M59",
     lambda x, down, **_: x.shape[0] == 16 and down.shape[1] > 192),
    ("rms_norm", "rms-norm-from-1024", "rows of 1,024 elements and more", "kind of M59",
     lambda x, **_: x.shape[1] >= 1024),
    ("all_reduce", "reduce-from-1024", "rows of 1,024 elements and more", "kind of M59",
     lambda y, **_: y[0].shape[1] >= 1024),
    ("attn_res", "attn-res-from-1024", "a hidden size of 1,024 and more", "kind of M54",
     lambda prefix, **_: prefix.shape[1] >= 1024),
    ("attn_res", "attn-res-final-at-64", "no output norm at 64 rows, the last mix of a model", "kind of M54",
     lambda prefix, out_norm_weight=None, **_: out_norm_weight is None and prefix.shape[0] == 64),
    ("output_mix", "mix-block-write-at-64", "a new prefix at 64 rows", "kind of M54",
     lambda prefix, replace_prefix, **_: replace_prefix and prefix.shape[0] == 64),
    ("output_mix", "mix-from-1024", "a hidden size of 1,024 and more", "kind of M54",
     lambda prefix, **_: prefix.shape[1] >= 1024),
    ("mla_query", "mla-query-rank-of-1536", "a query rank of 1,024 and more", "kind of M59",
     lambda q_b, **_: q_b.shape[1] >= 1024),
    ("mla_query", "mla-query-pages-of-64", "pages of 64 tokens", "kind of M79",
     lambda cache, **_: cache.shape[1] == 64),
    ("mla_attend", "mla-latent-of-512", "a latent of 512 elements", "kind of M59",
     lambda kv_rank, **_: kv_rank >= 512),
    ("mla_attend_dcp", "dcp-latent-of-512", "a latent of 512 elements", "kind of M59",
     lambda kv_rank, **_: kv_rank >= 512),
    ("mla_value", "mla-value-latent-of-512", "a latent of 512 elements", "kind of M59",
     lambda latent, **_: latent.shape[2] >= 512),
    ("moe_front", "moe-front-from-1024", "1,024 inputs and more", "kind of M59",
     lambda x, **_: x.shape[1] >= 1024),
    ("moe_tail", "moe-tail-latent-from-1024", "a latent of 1,024 elements and more", "kind of M59",
     lambda up_weight, **_: up_weight.shape[1] >= 1024),
    ("shared_expert", "moe-shared-from-1024", "1,024 inputs and more", "kind of M59",
     lambda x, **_: x.shape[1] >= 1024),
    ("experts", "moe-latent-from-1024", "a latent of 1,024 elements and more", "kind of M59",
     lambda z, **_: z.shape[1] >= 1024),
    ("experts", "moe-ids-from-256", "experts from the 257th on", "kind of M40",
     lambda ids, **_: bool((ids >= 256).any())),
    ("experts", "moe-more-than-64-chosen", "more than 64 experts that some row chose", "kind of M50",
     lambda ids, **_: len(ids.unique()) > 64),
)  # fmt: skip
"""Op, id, where it is wrong, sources, and whether a call is there."""


def _two_per_cent(where: Where) -> Callable[..., Any]:
    def faulty(op: Any, **case: Any) -> Any:
        result = op(**case)
        y: Tensor = result[1] if isinstance(result, tuple) else result
        if where(**case):
            y.copy_(y ^ 1 if not y.is_floating_point() else y * 1.02)
        return result

    return faulty


for _op, _id, _where, _sources, _is_there in PLACES:
    LAYER.op(_op, _id, f"{_op} is two per cent too large for {_where}", sources=_sources)(_two_per_cent(_is_there))
