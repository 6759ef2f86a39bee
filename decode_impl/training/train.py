"""Train k3-mini for one leg of minutes: read token shards, step in a CUDA graph, save the FP32 masters.

    python -m decode_impl.training.train --data DATA --out OUT --seconds 420 [--resume OUT_OF_THE_LAST_LEG]

DATA is written by `python -m evals.items.shards`, which may still be writing. OUT gets `state-*.safetensors` and
`log.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode_impl.presets import K3_MINI
from decode_impl.training import delta_rule, model
from decode_impl.training.model import K3Text, Precision
from decode_impl.training.optimiser import Optimiser
from decode_impl.training.state import load_state, save_state

FUSED = {
    model: ("kda_inputs", "gated_norm", "attn_res", "rms_norm", "situ", "expert_hidden", "expert_mix"),
    delta_rule: ("decay_factors",),
}
"""Element-wise functions that torch.compile turns into single kernels; the matrix products stay as they are."""


_PLAIN = {module: {name: getattr(module, name) for name in names} for module, names in FUSED.items()}


def fuse(on: bool) -> None:
    """Use the compiled or the plain form of the element-wise functions; compiled ones suit one shape only."""
    for module, functions in _PLAIN.items():
        for name, function in functions.items():
            setattr(module, name, torch.compile(function, dynamic=False) if on else function)


def batches(folder: Path, rows: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens i64 and loss weights f32 [rows,T+1] from `shard-*.npy` in order; waits for one that is being written."""
    index = 0
    while True:
        path = folder / f"shard-{index:04d}.npy"
        while not path.exists():
            if (folder / "done").exists() and not path.exists():
                return
            time.sleep(0.05)
        packed = torch.from_numpy(np.load(path)).to(device)  # i16 [R,T+1]: token + 512 * weight class
        for chunk in packed.split(rows):
            if len(chunk) == rows:
                wide = chunk.long()
                yield wide & 511, (wide >> 9).float() / 8
        index += 1


def weighted_loss(module: K3Text, tokens: Tensor, weights: Tensor, precision: Precision) -> Tensor:
    """Mean cross-entropy in nats over the predicted tokens, by weight."""
    logits = module(tokens[:, :-1], precision).float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (losses * weight).sum() / weight.sum().clamp(min=1)


class GraphedStep:
    """One training step (forward, backward, balance, update) on fixed input buffers, replayed as a CUDA graph."""

    def __init__(self, module: K3Text, optimiser: Optimiser, shape: tuple[int, int], precision: Precision) -> None:
        device = module.embed_tokens.device
        self.module, self.optimiser, self.precision = module, optimiser, precision
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.weights = torch.ones(shape, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = self.norm = torch.zeros((), device=device)

    def _step(self) -> tuple[Tensor, Tensor]:
        loss = weighted_loss(self.module, self.tokens, self.weights, self.precision)
        loss.backward()
        for moe in self.module.moe_layers():
            moe.balance(0.001)
        return loss.detach(), self.optimiser.step()

    def _zero(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def __call__(self, tokens: Tensor, weights: Tensor) -> None:
        self.tokens.copy_(tokens)
        self.weights.copy_(weights)
        if self.tokens.device.type != "cuda":
            self.loss, self.norm = self._step()
            self._zero()
            return
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step()
                    self._zero()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss, self.norm = self._step()
        self.graph.replay()


def profile_step(step: GraphedStep, tokens: Tensor, weights: Tensor, path: Path) -> None:
    """Write where the device time of one step goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(tokens, weights)
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=50, max_name_column_width=90)
    path.write_text(table, encoding="utf-8")


@torch.no_grad()
def heldout_bits(module: K3Text, path: Path, length: int, precision: Precision) -> dict[str, float]:
    """Bits per byte on each array of `heldout.npz` (byte tokens), in windows of `length` after a begin token."""
    module.eval()
    result = {}
    for name, tokens in np.load(path).items():
        rows = len(tokens) // (length - 1)
        windows = torch.from_numpy(tokens[: rows * (length - 1)].astype(np.int64)).view(rows, -1)
        windows = F.pad(windows, (1, 0), value=module.config.bos_token_id).to(module.embed_tokens.device)
        total = sum(float(weighted_loss(module, w, torch.ones_like(w), precision)) * len(w) for w in windows.split(16))
        result[name] = total / rows / math.log(2)
    module.train()
    return result


@torch.no_grad()
def answers(module: K3Text, folder: Path, precision: Precision, rows: int = 25) -> dict[str, dict[str, float]]:
    """For every `eval-NAME.npy`, teacher-forced: how often the answers are the model's own.

    `exact` is the share of items whose answer tokens are all the first choice, so that greedy decoding gives them
    word for word; `sampled` the mean probability of the whole answer at temperature 1; `tokens` the share of tokens.
    """
    module.eval()
    result = {}
    for path in sorted(folder.glob("eval-*.npy")):
        packed = torch.from_numpy(np.load(path)).long()
        exact = sampled = right = asked = 0.0
        for chunk in packed.split(rows):
            tokens, answer = (chunk & 511).to(module.embed_tokens.device), (chunk >> 9)[:, 1:] == 8
            answer = answer.to(tokens.device)
            logits = module(tokens[:, :-1], precision).float()
            hit = logits.argmax(-1) == tokens[:, 1:]
            chance = -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            exact += float((hit | ~answer).all(1).sum())
            sampled += float((chance.view_as(answer) * answer).sum(1).exp().sum())
            right, asked = right + float((hit & answer).sum()), asked + float(answer.sum())
        shares = {"exact": exact / len(packed), "sampled": sampled / len(packed), "tokens": right / asked}
        result[path.stem[5:]] = {name: round(share, 5) for name, share in shares.items()}
    module.train()
    return result


def main() -> None:
    """Run one leg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seconds", type=float, default=420, help="training time; the schedule follows the clock")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--warmup", type=float, default=0.03, help="share of the time for warming up")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time, at the end, for cooling down")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.004)
    parser.add_argument("--fp8-rows", type=float, default=0.25, help="share of rows that see an FP8 latent cache")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile the element-wise functions")
    parser.add_argument("--speed-only", action="store_true", help="stop after training, without saving or evaluating")
    arguments = parser.parse_args()
    started = time.time()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    fuse(not arguments.eager)
    module = K3Text(K3_MINI)
    if arguments.resume:
        load_state(module, arguments.resume)
    module.to(arguments.device)
    optimiser = Optimiser(module, arguments.matrix_rate, arguments.other_rate)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("a", encoding="utf-8") as log:
        train(module, optimiser, arguments, started, log)


def train(module: K3Text, optimiser: Optimiser, arguments: argparse.Namespace, started: float, log: Any) -> None:
    """The loop: the learning rate follows the clock, so a leg ends when its time does and never later."""

    def report(**fields: Any) -> None:
        line = json.dumps({"seconds": round(time.time() - started, 1), **fields})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    step, precision, count, begun = None, Precision(fp8_rows=arguments.fp8_rows), 0, time.time()
    for tokens, weights in batches(arguments.data, arguments.rows, torch.device(arguments.device)):
        if step is None:
            step = GraphedStep(module, optimiser, (tokens.shape[0], tokens.shape[1]), precision)
            optimiser.rate.fill_(1e-3)
            step(tokens, weights)
            if arguments.device == "cuda":
                profile_step(step, tokens, weights, arguments.out / "profile.txt")
            begun = time.time()
            report(event="ready", rows=tokens.shape[0], length=tokens.shape[1] - 1)
        part = (time.time() - begun) / arguments.seconds
        if part >= 1:
            break
        optimiser.rate.fill_(max(0.01, min(1.0, part / arguments.warmup, (1 - part) / arguments.decay)))
        step(tokens, weights)
        count += 1
        if count % 20 == 0:
            step.loss.item()  # keeps the host at most twenty steps ahead of the clock
        if count in (5, 20, 50) or count % 100 == 0:
            rate = count * tokens.numel() / (time.time() - begun)
            report(step=count, loss=float(step.loss), norm=float(step.norm), tokens_per_second=round(rate))
    if arguments.speed_only:
        report(event="speed", tokens_per_second=round(count * tokens.numel() / (time.time() - begun)))
        return
    fuse(False)
    save_state(module, arguments.out)
    report(event="heldout bits", **heldout_bits(module, arguments.data / "heldout.npz", 1024, Precision()))
    forms = {"bf16": Precision(mxfp4_experts=False), "mxfp4": Precision(), "mxfp4+fp8": Precision(fp8_rows=1.0)}
    for name, precision in forms.items():
        report(event=name, steps=count, **answers(module, arguments.data, precision))
    report(event="calibration", **calibrate(module, tokens[:8, :-1]))
    save_state(module, arguments.out)


@torch.no_grad()
def calibrate(module: K3Text, tokens: Tensor) -> dict[str, list[float]]:
    """Set every MLA's FP8 scales from what it sees: largest magnitude x 1.07 / 448, never a power of two."""
    module.eval()
    module(tokens, Precision())
    module.train()
    scales: dict[str, list[float]] = {"k_scale": [], "q_scale": []}
    for mla in module.mla_layers():
        for name, seen in (("k_scale", mla.last_row), ("q_scale", mla.last_query)):
            assert seen is not None
            value = float(seen.float().abs().max()) * 1.07 / 448
            getattr(mla, name).fill_(value)
            scales[name].append(value)
        mla.last_row = mla.last_query = None
    return scales


if __name__ == "__main__":
    main()
