"""A stand-in for vLLM's half, made by our own engine: what the comparison says of equals, and of a known fault.

python -m benchmarks.vllm_reference.stand_in cases.json FOLDER [--ranks 4] [--backend auto] [--fault ID]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm_reference.cases import read
from benchmarks.vllm_reference.ours import Variant, decode_all, forced_decode, runner
from benchmarks.vllm_reference.outputs import LAYERS, save, save_view
from decode_impl import generic
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.runner import BUILTIN_PATHS, Paths
from validation.faults.catalogue import FAULTS

OP_FAULTS = {name: fault for name, fault in FAULTS.items() if fault.injectable and "specialized" in fault.paths}
"""Faults of the catalogue that break an op of the specialised path."""


def faulty(fault: str) -> Paths:
    """Both paths, with a fault in the specialised one."""
    ops = BUILTIN_PATHS.specialized
    return Paths(BUILTIN_PATHS.generic, {**ops, **OP_FAULTS[fault].mutate(ops)})


def seen(folder: Path, sequence: Sequence[int], prompt_length: int) -> dict[str, Tensor]:
    """What `probe` keeps, from our generic path at one rank: by the same names, of the same rows."""
    calls: dict[str, list[tuple[dict[str, Any], Any]]] = defaultdict(list)

    def recording(name: str) -> Any:
        op = generic.OPS[name]

        def wrapped(**arguments: Any) -> Any:
            kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
            result = op(**arguments)
            calls[name].append((kept, result))
            return result

        return wrapped

    on = runner(folder, Variant(paths=Paths({name: recording(name) for name in generic.OPS}, {})), 1, len(sequence))
    forced_decode(on, [sequence], prompt_length)
    config, steps = on.weights.config, len(sequence) - prompt_length
    found = {}
    for index in range(config.num_hidden_layers):
        of_layer = _of_layer(on.weights, calls, index, steps)
        found |= {f"layers.{index}.{name}": torch.cat(parts) for name, parts in of_layer.items()}
    last = [step[-1:] for step in _outputs(calls, "rms_norm", 0, 1)]
    ends = [arguments["x"][-1:] for arguments, _ in calls["rms_norm"]]
    head = generic.OPS["projection"](x=torch.cat(last), weight=on.weights.lm_head[0])
    return found | {"final_mix": torch.cat(ends), "head_in": torch.cat(last), "logits": head}


def _outputs(calls: Any, op: str, offset: int, per_step: int) -> list[Any]:
    return [result for _, result in calls[op][offset::per_step]]


def _of_layer(weights: Any, calls: Any, index: int, steps: int) -> dict[str, list[Tensor]]:
    """One layer's tensors by the probe's names, one per step."""
    config, layer = weights.config, weights.layers[index]
    mixes = calls["attn_res"][index :: len(calls["attn_res"]) // steps]
    into_mlp = calls["output_mix"][index :: config.num_hidden_layers]
    o_proj = layer.attention[0].o_proj
    kept = {
        "prefix": [given["prefix"] for given, _ in mixes],
        "blocks": [given["blocks"] for given, _ in mixes],
        "attn_in": [mixed for _, (_, mixed) in mixes],
        "heads": [given["y"][0] for given, _ in into_mlp],
        "attn_out": [generic.OPS["projection"](x=given["y"][0], weight=o_proj) for given, _ in into_mlp],
        "mlp_in": [mixed for _, (_, mixed) in into_mlp],
    }
    if index:
        kept["delta"] = [given["delta"] for given, _ in mixes]
    if not config.is_mla(index):
        in_proj = layer.attention[0].in_proj
        kept["proj"] = [generic.OPS["projection"](x=x, weight=in_proj) for x in kept["attn_in"]]
    moe = [i for i in range(config.num_hidden_layers) if not config.is_dense(i)]
    if index not in moe:
        kept["mlp_out"] = _outputs(calls, "all_reduce", index, config.num_hidden_layers - len(moe))
        return kept
    place = moe.index(index)
    kept["router"] = [logits for logits, _ in _outputs(calls, "moe_front", place, len(moe))]
    kept["latent_in"] = [z for _, z in _outputs(calls, "moe_front", place, len(moe))]
    tails = calls["moe_tail"][place :: len(moe)]
    kept["latent_sum"] = [given["latent"][0] for given, _ in tails]
    kept["shared"] = [given["shared"][0] for given, _ in tails]
    kept["mlp_out"] = [delta for _, delta in tails]
    return kept


def main() -> None:
    """Write the stand-in's outputs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="auto", choices=("auto", "latency_specialized"))
    parser.add_argument("--fault", choices=sorted(OP_FAULTS))
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = read(options.cases)
    paths = faulty(options.fault) if options.fault else BUILTIN_PATHS
    variant = Variant(options.ranks, "latency_specialized" if options.fault else options.backend, paths)
    outputs = decode_all(EMBEDDED_MODEL, cases, variant, not options.no_answers)
    outputs.about |= {"stand-in": True, "fault": options.fault}
    save(options.folder, outputs, *outputs.views)
    save_view(options.folder, LAYERS, seen(EMBEDDED_MODEL, cases.sequences[0], cases.prompt_length))


if __name__ == "__main__":
    main()
