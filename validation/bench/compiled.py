"""The same ops through torch.compile: what the generic arm has to be no slower than.

Each op is compiled by itself and captured like the arms. This is a yardstick of speed, and nothing else uses it.
Experts are gathered and widened (no grouped product of torch takes MXFP4 on SM90), which writes BF16 copies of those
chosen; so a second table takes the generic arm's experts instead, and compares all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.ops import OpTable
from validation.bench import compiled_ops

_OPS: dict[str, Callable[..., Any]] = {
    name: getattr(compiled_ops, name)
    for name in (
        *("projection", "rms_norm", "attn_res", "output_mix", "kda_step", "mla_query", "mla_attend", "mla_value"),
        *("moe_front", "route", "shared_expert", "moe_tail"),
    )
}
_MOST_FORMS = 64
"""Forms of one op that may be compiled: residual mixes have one for each number of blocks."""


def compiled_tables(
    base: OpTable, transform: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[OpTable, OpTable]:
    """Two tables of one rank's decode step: every op transformed, and all but the experts, which are those of `base`.

    `transform` is `compiling()`, or the identity, for tests.
    """
    gathered = transform(compiled_ops.chosen_experts)

    def experts(
        *, z: Tensor, ids: Tensor, weights: Tensor, w13: MXFP4Weight, w2: MXFP4Weight, beta: float, linear_beta: float
    ) -> Tensor:
        tensors = (w13.packed, w13.scale, w2.packed, w2.scale)
        result: Tensor = gathered(z, ids, weights, *tensors, beta, linear_beta)
        return result

    ops = {name: transform(op) for name, op in _OPS.items()}
    others = {**base, **ops, "all_reduce": lambda *, y: y[0]}
    return {**others, "experts": experts}, others


def compiling() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`torch.compile` for fixed shapes, as it comes."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = _MOST_FORMS
    torch._dynamo.config.accumulated_recompile_limit = 4 * _MOST_FORMS

    def transform(op: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(op, dynamic=False)
        return compiled

    return transform
