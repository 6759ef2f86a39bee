"""vLLM's half: the cases through vLLM's own K3 path, each part written as it comes, with fallbacks that say so.

    python -m benchmarks.vllm_reference.run_vllm CASES OUT [--model FOLDER]

Attempts run in processes of their own, one after another, until one has decoded; then the same model once more through
other kernels, with CUDA graphs. OUT/main and OUT/graphs get the outputs, OUT/attempts.json what was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.vllm_reference import convert, engine, views
from benchmarks.vllm_reference.cases import Cases, read
from benchmarks.vllm_reference.outputs import FIRST, LAYERS, Outputs, compositions, save, save_view
from benchmarks.vllm_reference.probe import probed

SHIPPED = Path(__file__).parents[2] / "decode_impl" / "assets" / "k3-mini"
PROBED_SEQUENCE = 0

SHOWN = 3000
"""Characters of the log that are shown of an attempt that failed."""


@dataclass(frozen=True)
class Attempt:
    """One way to run: `files` says which checkpoint (`shipped`, or converted `experts`, `mla`, `experts+mla`)."""

    name: str
    files: str
    eager: bool
    seconds: int

    def prepared(self, model: Path, scratch: Path) -> Path:
        """The checkpoint folder to load: the shipped one itself, or its conversion."""
        if self.files == "shipped":
            return model
        folder = scratch / self.files.replace("+", "-")
        if not (folder / "config.json").exists():
            convert.convert(model, folder, experts="experts" in self.files, mla="mla" in self.files)
        return folder


MAIN = (
    Attempt("main", "shipped", True, 210),
    Attempt("main", "experts", True, 110),
    Attempt("main", "mla", True, 110),
    Attempt("main", "experts+mla", True, 110),
)
"""In order of preference: the very files first."""


GRAPHS = Attempt("graphs", "experts+mla", False, 120)
"""The second run: other kernels for the same model (BF16 experts, MLA at the released sizes), none of vLLM's code
replaced, CUDA graphs."""


def run_one(attempt: Attempt, model: Path, cases: Cases, out: Path, scratch: Path) -> None:
    """Start the engine of one attempt and read out all its views; a part that fails is named and the rest goes on."""
    engine.prepare()
    folder, outputs = attempt.prepared(model, scratch), Outputs()
    shipped = json.loads((model / "config.json").read_text(encoding="utf-8"))
    loaded = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    outputs.about = {"implementation": "vllm", "attempt": asdict(attempt), "substitutions": []}
    _prepare_mla(outputs, shipped, loaded)
    started = time.monotonic()
    llm = engine.start(folder, attempt.eager)
    outputs.about |= {"start_seconds": round(time.monotonic() - started, 1), **_versions()}
    save(out, outputs)
    for name, part in _parts(llm, attempt, cases, loaded["vocab_size"], outputs, out).items():
        begun = time.monotonic()
        try:
            part()
        except Exception as error:
            outputs.failures[name] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        outputs.about[f"{name}_seconds"] = round(time.monotonic() - begun, 1)
        save(out, outputs)
        print(f"{attempt.name} ({attempt.files}): {name} {outputs.failures.get(name, 'done')}"[:300], flush=True)


def _prepare_mla(outputs: Outputs, shipped: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Ask the fused epilogues whether they take these sizes; where not, use copies. Set a converted scale back."""
    sizes = (loaded["qk_nope_head_dim"], loaded["qk_rope_head_dim"], loaded["kv_lora_rank"])
    refusal = engine.epilogue_refusal(*sizes)
    outputs.about["fused MLA epilogues"] = refusal or "taken as they are"
    if refusal:
        engine.use_copies_as_epilogues()
        outputs.about["substitutions"].append("two fused MLA epilogues replaced by copies (no arithmetic)")
    if loaded["qk_nope_head_dim"] != shipped["qk_nope_head_dim"]:
        engine.use_softmax_scale(convert.softmax_scale(shipped))
        outputs.about["substitutions"].append("softmax scale of the padded MLA set to the shipped model's")


def _versions() -> dict[str, Any]:
    import torch
    import transformers
    import triton
    import vllm

    names = {"vllm": vllm, "torch": torch, "triton": triton, "transformers": transformers}
    versions = {name: module.__version__ for name, module in names.items()}
    return {**versions, "device": torch.cuda.get_device_name(), "environment": engine.ENVIRONMENT}


def _parts(
    llm: Any, attempt: Attempt, cases: Cases, vocab: int, outputs: Outputs, out: Path
) -> dict[str, Callable[[], None]]:
    """What to read out, in order of worth."""
    decode = partial(views.forced_decode, llm, prompt_length=cases.prompt_length, vocab=vocab)
    groups = compositions(len(cases.sequences))

    def view(name: str, composition: str, logits_of: Callable[..., Any]) -> None:
        import torch

        parts = [logits_of([cases.sequences[i] for i in group]) for group in groups[composition]]
        outputs.views.setdefault(name, {})[composition] = torch.cat(parts)
        save(out, outputs, name)

    def answers() -> None:
        outputs.answers[FIRST] = views.answer(llm, cases.questions, cases.eos, vocab)

    def layers() -> None:
        save_view(out, LAYERS, probed(llm, decode, cases.sequences[PROBED_SEQUENCE]))

    def choices() -> None:
        llm.apply_model(lambda built: outputs.about.update(choices=engine.choices(built)))

    prefill = partial(views.prefill, llm, vocab=vocab)
    parts: dict[str, Callable[[], None]] = {"choices": choices}
    parts |= {f"decode-{name}": partial(view, "decode", name, decode) for name in groups}
    parts |= {"answers": answers}
    if attempt.eager:
        parts |= {"layers": layers, **{f"prefill-{name}": partial(view, "prefill", name, prefill) for name in groups}}
    return parts


def run_in_process(attempt: Attempt, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run one attempt in a process of its own, at most `attempt.seconds`; says how it ended."""
    command = [sys.executable, "-m", "benchmarks.vllm_reference.run_vllm", str(arguments.cases), str(arguments.out)]
    command += ["--model", str(arguments.model), "--scratch", str(scratch), "--attempt", json.dumps(asdict(attempt))]
    begun = time.monotonic()
    log = arguments.out / "log.txt"
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"\n==== {attempt}\n")
        sink.flush()
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(attempt.seconds)
        except subprocess.TimeoutExpired:
            code = f"stopped after {attempt.seconds} s"
        finally:
            # Also when this process is told to stop: an engine left behind would keep the GPU and go on writing.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        print(log.read_text(encoding="utf-8", errors="replace")[-SHOWN:], flush=True)
    return {**asdict(attempt), "ended": code, "took": round(time.monotonic() - begun, 1)}


def decoded(out: Path) -> bool:
    """Whether an attempt left forced-decode or prefill logits."""
    return any((out / f"{view}.safetensors").exists() for view in ("decode", "prefill"))


def main() -> None:
    """Try the attempts in order, then the run with graphs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attempt:
        attempt = Attempt(**json.loads(arguments.attempt))
        run_one(attempt, arguments.model, read(arguments.cases), arguments.out / attempt.name, arguments.scratch)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run_vllm: stopped"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tried: list[dict[str, Any]] = []

    def attempt_once(attempt: Attempt, scratch: Path) -> None:
        tried.append(run_in_process(attempt, arguments, scratch))
        (arguments.out / "attempts.json").write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(tried[-1]), flush=True)

    with tempfile.TemporaryDirectory() as name:
        for attempt in MAIN:
            attempt_once(attempt, Path(name))
            if decoded(arguments.out / "main"):
                attempt_once(GRAPHS, Path(name))
                break
    sys.exit(0 if decoded(arguments.out / "main") else 1)


if __name__ == "__main__":
    main()
