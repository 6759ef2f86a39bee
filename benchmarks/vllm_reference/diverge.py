"""Layer by layer: where vLLM's hidden states and ours part on one sequence, beside where two decodes of ours do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm_reference.explain import relative_rms
from benchmarks.vllm_reference.ours import Variant, forced_decode, runner
from decode_impl import generic
from decode_impl.runner import Paths


def hidden_states(folder: Path, sequence: Sequence[int], prompt_length: int, ranks: int = 1) -> dict[str, Tensor]:
    """Our own `attn_in`, `mlp_in` and `mlp_out` of every layer, by the probe's names, on a free-running decode."""
    kept: dict[str, list[Tensor]] = defaultdict(list)

    def recording(name: str) -> Any:
        op = generic.OPS[name]

        def wrapped(**arguments: Any) -> Any:
            result = op(**arguments)
            kept[name].append((result[1] if isinstance(result, tuple) else result).clone())
            return result

        return wrapped

    names = ("attn_res", "output_mix", "all_reduce", "moe_tail")
    ops = {**generic.OPS, **{name: recording(name) for name in names}}
    on = runner(folder, Variant(ranks, paths=Paths(ops, {})), 1, len(sequence))
    forced_decode(on, [sequence], prompt_length)
    config, hidden = on.weights.config, {}
    layers = config.num_hidden_layers
    dense = [i for i in range(layers) if config.is_dense(i)]
    per_step = {
        "attn_res": [*(f"layers.{i}.attn_in" for i in range(layers)), "end"],
        "output_mix": [f"layers.{i}.mlp_in" for i in range(layers)],
        "all_reduce": [f"layers.{i}.mlp_out" for i in dense],
        "moe_tail": [f"layers.{i}.mlp_out" for i in range(layers) if i not in dense],
    }
    for op, outputs in per_step.items():
        for offset, name in enumerate(outputs):
            hidden[name] = torch.cat(kept[op][offset :: len(outputs)])
    return hidden


def divergence(
    theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], again: Mapping[str, Tensor], prompt_length: int
) -> list[tuple[str, float, float]]:
    """(place, relative RMS of theirs from ours, of another decode of ours from ours), in the order of the model."""
    rows = slice(prompt_length, None)
    places = [n for n in theirs if n in ours and n.rsplit(".", 1)[-1] in ("attn_in", "mlp_in", "mlp_out")]
    order = {"attn_in": 0, "mlp_in": 1, "mlp_out": 2}
    places.sort(key=lambda name: (int(name.split(".")[1]), order[name.rsplit(".", 1)[-1]]))
    return [
        (name, relative_rms(ours[name][rows], theirs[name][rows]), relative_rms(ours[name][rows], again[name][rows]))
        for name in places
    ]
