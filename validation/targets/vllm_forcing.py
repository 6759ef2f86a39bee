"""A vLLM logits processor that makes a request's next tokens the given ones, for teacher-forced decode.

Imported by vLLM inside its engine. Raw logits are recorded before it acts: it changes what is drawn, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

FORCED = "decodegate_forced"
"""Key of `SamplingParams.extra_args`: the tokens to be drawn, from the first one on."""


class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
    """Draws the tokens of `extra_args[FORCED]` in turn; requests without it are left alone."""

    def is_argmax_invariant(self) -> bool:
        """False: also greedy requests need it."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
        """What acts on one request's row, f32 [V], given the tokens drawn so far."""
        forced = (params.extra_args or {}).get(FORCED)
        if forced is None:
            return None

        def force(drawn: list[int], logits: Tensor) -> Tensor:
            only = logits.clone()
            only.fill_(float("-inf"))
            only[forced[len(drawn)]] = 0.0
            return only

        return force
