"""Settings of the parity gate that its tests share: a cell or two, short texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PROMPT, DECODE = 20, 4


def settings_of(
    kv: str = "fp8",
    ranks: Sequence[int] = (1,),
    batches: Sequence[int] = (2,),
    sequences: int = 4,
    prompt: int = PROMPT,
    decode: int = DECODE,
) -> dict[str, Any]:
    cell = {"kv_cache_dtype": kv, "tensor_parallel": list(ranks), "batches": list(batches)}
    return {"prompt_length": prompt, "decode_length": decode, "min_sequences": sequences, "cells": [cell]}
