"""Compare vLLM's half with ours: Markdown for docs/measurements/ and the figures as JSON.

    python -m benchmarks.vllm_reference.run_compare CASES VLLM_OUT [--also OUT ...] --to FOLDER [--device cpu]

VLLM_OUT is one outputs folder of `run_vllm` (OUT/main); folders after `--also` (OUT/graphs) are compared likewise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.vllm_reference import contracts, report
from benchmarks.vllm_reference.cases import Cases, read
from benchmarks.vllm_reference.compare import compare_view, distance, in_floors, pair_answers
from benchmarks.vllm_reference.diverge import divergence, hidden_states
from benchmarks.vllm_reference.explain import explain
from benchmarks.vllm_reference.ours import Variant, decode_all
from benchmarks.vllm_reference.outputs import FIRST, LAYERS, Outputs, load, save
from benchmarks.vllm_reference.run_vllm import PROBED_SEQUENCE, SHIPPED
from decode_impl import generic
from decode_impl.checkpoint import load_checkpoint
from decode_impl.runner import Paths

RANKS = 2
"""Ranks of our floor: the fewest whose all-reduces round partial sums."""


def our_half(folder: Path, model: Path, cases: Cases, variant: Variant, reference: bool) -> Outputs:
    """Our outputs, kept in `folder` and read back the next time if cases, weights and ops are still the same; only the
    reference gives answers."""
    inputs = {"cases": digest(asdict(cases)), "weights": load_checkpoint(model).digest, "ops": ops_digest()}
    if (folder / "run.json").exists():
        kept = load(folder)
        if kept.about.get("inputs") == inputs and kept.about["device"] == variant.device:
            return kept
    outputs = decode_all(model, cases, variant, with_answers=reference, both_compositions=reference)
    outputs.about["inputs"] = inputs
    save(folder, outputs, *outputs.views)
    return outputs


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def ops_digest() -> str:
    """SHA-256 of the sources of the generic ops and of the roundings put in their place."""
    files = [*sorted(Path(generic.__file__).parent.glob("*.py")), Path(contracts.__file__)]
    return digest([file.read_text(encoding="utf-8") for file in files])


def dense_experts(theirs: Outputs) -> bool:
    """Whether their experts ran in BF16."""
    return "experts" in theirs.about.get("attempt", {}).get("files", "")


def judge(cases: Cases, theirs: Outputs, ours: Mapping[str, Outputs]) -> dict[str, Any]:
    """Views and answers of one outputs folder against our reference, with every floor and the roundings' share."""
    reference, floor = ours["reference"], ours["floor"]
    found: dict[str, Any] = {"views": {}, "answers": []}
    for view, logits in theirs.views.items():
        if FIRST not in logits:
            continue
        floors = {f"ours, {RANKS} ranks": floor.views[view][FIRST]}
        if "second" in reference.views[view]:
            floors["ours, another composition"] = reference.views[view]["second"]
        found["views"][view] = compare_view(reference.views[view], logits, floors)
        contract = ours["dense" if dense_experts(theirs) else "packed"].views[view][FIRST]
        explained = distance(contract, logits[FIRST])
        widest = found["views"][view]["floors"][found["views"][view]["widest"]]
        found["views"][view]["explained"] = explained
        found["views"][view]["explained_ratio"] = in_floors(explained, widest)
    if FIRST in theirs.answers:
        pairs = zip(cases.questions, reference.answers[FIRST], theirs.answers[FIRST], strict=True)
        found["answers"] = [pair_answers(question.kind, a, b) for question, a, b in pairs]
    return found


def plain(value: Any) -> Any:
    """Figures as JSON: dataclasses as dictionaries, numbers that are not finite as strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def render(cases: Cases, runs: Mapping[str, tuple[Outputs, dict[str, Any]]], explained: dict[str, Any]) -> str:
    """The whole report."""
    lines = ["# vLLM's own K3 path against the generic path", ""]
    lines += [f"{len(cases.sequences)} held-out windows of {cases.length} tokens (seed {cases.seed}), the first"]
    lines += [
        f"{cases.prompt_length} prefilled, the rest decoded teacher-forced; BF16 latent cache, FP32 KDA state.",
        "",
    ]
    for name, (outputs, found) in runs.items():
        lines += [f"## {name}", ""]
        for view, figures in found["views"].items():
            lines += report.view_table(view, figures)
            ratio, d = figures["explained_ratio"], figures["explained"]
            lines += [f"Given vLLM's roundings (`contracts.py`), ours is {d.typical:.2e} away in typical KL,"]
            lines += [f"{ratio.mean:.2f} floors ({ratio.lower:.2f} .. {ratio.upper:.2f}).", ""]
        if found["answers"]:
            lines += report.answers_table(found["answers"])
        lines += report.about_table("What ran", outputs.about, outputs.failures)
    lines += ["## Where differences come from", ""]
    if explained:
        lines += report.op_table(explained["ops"], explained["ops_with_roundings"])
        lines += report.layer_table(explained["layers"])
    lines += report.contract_table()
    return "\n".join(lines).rstrip() + "\n"


def explanation(model: Path, cases: Cases, folder: Path, dense: bool) -> dict[str, Any]:
    """The op and layer tables, where the folder has a probe's file."""
    if not (folder / f"{LAYERS}.safetensors").exists():
        return {}
    seen, sequence = load_file(folder / f"{LAYERS}.safetensors"), cases.sequences[PROBED_SEQUENCE]
    ours = hidden_states(model, sequence, cases.prompt_length)
    again = hidden_states(model, sequence, cases.prompt_length, RANKS)
    return {
        "ops": explain(model, seen, cases.prompt_length),
        "ops_with_roundings": explain(model, seen, cases.prompt_length, contracts.operations(dense)),
        "layers": divergence(seen, ours, again, cases.prompt_length),
    }


def main() -> None:
    """Decode our half, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--also", type=Path, nargs="*", default=[])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        cases = read(options.cases)
        theirs = {folder.name: load(folder) for folder in (options.theirs, *options.also)}
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    variants = {"reference": Variant(device=options.device), "floor": Variant(RANKS, device=options.device)}
    for name, dense in {"packed": False, "dense": True}.items():
        if any(dense_experts(outputs) == dense for outputs in theirs.values()):
            variants[name] = Variant(paths=Paths(contracts.operations(dense), {}), device=options.device)
    ours = {
        name: our_half(options.to / f"ours-{name}", options.model, cases, variant, name == "reference")
        for name, variant in variants.items()
    }
    runs = {name: (outputs, judge(cases, outputs, ours)) for name, outputs in theirs.items()}
    explained = explanation(options.model, cases, options.theirs, dense_experts(theirs[options.theirs.name]))
    options.to.mkdir(parents=True, exist_ok=True)
    figures = {name: {"about": outputs.about, "found": found} for name, (outputs, found) in runs.items()}
    text = json.dumps(plain({"runs": figures, "explained": explained}), indent=1)
    (options.to / "comparison.json").write_text(text + "\n", encoding="utf-8")
    (options.to / "comparison.md").write_text(render(cases, runs, explained), encoding="utf-8")
    for name, (_, found) in runs.items():
        print(name, {view: figures["verdict"] for view, figures in found["views"].items()})


if __name__ == "__main__":
    main()
