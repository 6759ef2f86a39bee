"""Teach a block drafter what its target says: one run of minutes on the shards that the target was trained on.

    python -m decode_impl.training.train_drafter --model FOLDER --data DATA --out DRAFTER --seconds 240

DATA is written by `python -m evals.items.shards`, which may still be writing. Only the target's *own* tokens are
taught: places of an answer or text where the target's first choice, given all tokens before, is the token that stands
there. Along such tokens the text is the target's greedy text, so one parallel forward stands for generating it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from decode_impl.checkpoint import load_checkpoint
from decode_impl.drafter.checkpoint import save_drafter
from decode_impl.drafter.config import DrafterConfig
from decode_impl.drafter.model import DrafterModel, stored_as_mxfp4
from decode_impl.training.model import K3Text, Precision
from decode_impl.training.optimiser import orthogonalise
from decode_impl.training.quantise import fake_mxfp4
from decode_impl.training.restore import restore
from decode_impl.training.train import batches

DISCOUNT = 0.85
"""Weight of a draft relative to the one before it: a later draft counts only where all before it were accepted."""

PROMPT = 0.2
"""Loss weights of `evals.items.shards` above this mark text and answers; prompts lie below."""


class Told(NamedTuple):
    """What a target says along a text: its taps [B,T,H] each, and `own` bool [B,T], where the token is its own."""

    taps: list[Tensor]
    own: Tensor


@torch.no_grad()
def listen(target: K3Text, tokens: Tensor, taps: tuple[int, ...]) -> Told:
    """Run the target along tokens i64 [B,T] and tap its residual mixtures as `decode_impl.model.forward` does."""
    tapped: dict[int, Tensor] = {}
    length = tokens.shape[1]

    def keep(tap: int) -> Any:
        return lambda _, inputs: tapped.update({tap: inputs[0][:, :length]})

    last = target.config.num_hidden_layers
    modules: list[Any] = [layer.self_attn for layer in target.layers]
    hooks = [modules[tap].register_forward_pre_hook(keep(tap)) for tap in taps if tap < last]
    hooks += [target.output_mix.register_forward_hook(lambda _, __, out: tapped.update({last: out[:, :length]}))]
    logits = target(tokens, Precision())
    for hook in hooks:
        hook.remove()
    own = F.pad(logits[:, :-1].argmax(-1) == tokens[:, 1:], (1, 0))
    return Told([tapped[tap] for tap in taps], own)


def block_logits(
    drafter: DrafterModel, target: K3Text, told: Told, tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits of the blocks at places `anchors` i64 [B,A] under forced tokens, and the tokens they should give.

    Returns (f32 [B,A,K,V], i64 [B,A,K]); places behind the text's end are those of its last token.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    latents = drafter.latents(told.taps)
    context = drafter.context_rows(latents, places)
    before = (anchors - 1).clamp(min=0).unsqueeze(-1).expand(-1, -1, latents.shape[-1])
    embedded = F.embedding(tokens.gather(1, anchors), target.embed_tokens.bfloat16().float())
    hidden = drafter.block_hidden(embedded, latents.gather(1, before), anchors, context, drafter.config.max_drafts)
    ahead = anchors.unsqueeze(-1) + torch.arange(drafter.config.max_drafts + 1, device=tokens.device)
    around = tokens.gather(1, ahead.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(ahead)
    logits = F.linear(hidden, target.lm_head.bfloat16().float()) + drafter.markov_bias(around[..., :-1])
    return logits, around[..., 1:]


def block_loss(
    drafter: DrafterModel, target: K3Text, tokens: Tensor, weights: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Mean discounted cross-entropy over `count` random anchors of every row, and the mean length that would be
    accepted of their blocks if each draft saw the right token before it."""
    told = listen(target, tokens, drafter.config.taps)
    taught = (weights > PROMPT) & told.own
    # By the square of the loss weight, text counts a quarter of an answer.
    chance = torch.where(weights > PROMPT, weights.square(), 1e-9)
    anchors = torch.multinomial(chance, count, replacement=True)
    logits, wanted = block_logits(drafter, target, told, tokens, anchors)
    ahead = anchors.unsqueeze(-1) + 1 + torch.arange(wanted.shape[-1], device=tokens.device)
    inside = ahead < tokens.shape[1]
    valid = taught.gather(1, ahead.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(ahead) & inside
    valid = valid.cumprod(-1).bool()
    discount = DISCOUNT ** torch.arange(wanted.shape[-1], device=tokens.device)
    weight = valid * discount
    losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(weight)
    hits = ((logits.argmax(-1) == wanted) & valid).cumprod(-1).sum(-1)
    return (losses * weight).sum() / weight.sum().clamp(min=1), 1 + hits.float().mean()


@torch.no_grad()
def acceptance(drafter: DrafterModel, target: K3Text, tokens: Tensor, answer: Tensor) -> dict[int, float]:
    """Mean tokens a verify step commits at 3, 5 and 7 drafts, stepping through the answers of rows i64 [B,T].

    A row counts as long as its tokens are the target's own; `answer` bool [B,T] marks its answer.
    """
    told = listen(target, tokens, drafter.config.taps)
    steps = dict.fromkeys((3, 5, 7), 0)
    committed = dict.fromkeys(steps, 0)
    for row in range(tokens.shape[0]):
        places = answer[row].nonzero().squeeze(-1)
        foreign = (~told.own[row, places]).nonzero().squeeze(-1)
        places = places[: int(foreign[0])] if len(foreign) else places
        if len(places) < 2:
            continue
        one = Told([tap[row : row + 1] for tap in told.taps], told.own[row : row + 1])
        matched = _matched(drafter, target, one, tokens[row : row + 1], places[None, :-1])
        for drafts in steps:
            at = 0
            while at < len(places) - 1:
                step = 1 + min(drafts, int(matched[at]))
                step = min(step, len(places) - 1 - at)
                steps[drafts], committed[drafts], at = steps[drafts] + 1, committed[drafts] + step, at + step
    return {drafts: round(committed[drafts] / max(1, steps[drafts]), 3) for drafts in steps}


def _matched(drafter: DrafterModel, target: K3Text, told: Told, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Drafts that agree with the text before the first that does not, by anchor: i64 [A]. One row.

    Along agreeing drafts the Markov head sees the text itself, so forcing the tokens changes nothing.
    """
    logits, wanted = block_logits(drafter, target, told, tokens, anchors)
    ahead = anchors.unsqueeze(-1) + 1 + torch.arange(wanted.shape[-1], device=tokens.device)
    hits = (logits.argmax(-1) == wanted) & (ahead < tokens.shape[1])
    return hits.cumprod(-1).sum(-1)[0]


def evaluate(drafter: DrafterModel, target: K3Text, data: Path, rows: int) -> Iterator[tuple[str, dict[int, float]]]:
    """Acceptance lengths on the first `rows` items of every `eval-NAME.npy`."""
    device = target.embed_tokens.device
    for path in sorted(data.glob("eval-*.npy")):
        packed = torch.from_numpy(np.load(path)[:rows]).long().to(device)
        yield path.stem.removeprefix("eval-"), acceptance(drafter, target, packed & 511, (packed >> 9) == 8)


class FakeMXFP4(nn.Module):
    """A parametrisation that shows a projection as its checkpoint will hold it."""

    def forward(self, weight: Tensor) -> Tensor:
        return fake_mxfp4(weight)


def quantise(drafter: DrafterModel) -> None:
    """Put MXFP4 into the loop for every projection that a checkpoint stores so."""
    for name in [name for name, _ in drafter.named_parameters() if stored_as_mxfp4(name)]:
        owner, _, leaf = name.rpartition(".")
        parametrize.register_parametrization(drafter.get_submodule(owner), leaf, FakeMXFP4())


def finish(drafter: DrafterModel) -> None:
    """Take MXFP4 out of the loop again; the projections keep the values that they showed."""
    for module in list(drafter.modules()):
        for leaf in list(getattr(module, "parametrizations", {})):
            parametrize.remove_parametrizations(module, leaf)


class DrafterOptimiser:
    """Muon for the projections, AdamW for the rest; `part` in 0..1 scales both rates."""

    def __init__(self, drafter: DrafterModel, matrix_rate: float, other_rate: float) -> None:
        named = list(drafter.named_parameters())
        self.matrices: dict[torch.Size, list[nn.Parameter]] = {}
        for _, p in ((n, p) for n, p in named if n.endswith("original")):
            self.matrices.setdefault(p.shape, []).append(p)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.matrices.items()}
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        others = [p for n, p in named if not n.endswith("original")]
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.01)

    @torch.no_grad()
    def step(self, part: float) -> None:
        """One update from the gradients, which are cleared."""
        for shape, group in self.matrices.items():
            grads = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self.momentum[shape] = self.momentum[shape].to(grads).lerp_(grads, 0.05)
            rate = part * self.matrix_rate
            updates = orthogonalise(grads.lerp(momentum, 0.95)) * (rate * max(1.0, shape[0] / shape[1]) ** 0.5)
            for p, update in zip(group, updates, strict=True):
                p.mul_(1 - 0.05 * rate).sub_(update)
                p.grad = None
        self.adam.param_groups[0]["lr"] = part * self.other_rate
        self.adam.step()
        self.adam.zero_grad()


def train(drafter: DrafterModel, target: K3Text, arguments: argparse.Namespace) -> None:
    """The loop. The learning rate follows the clock, so a run ends when its time does."""
    quantise(drafter)
    optimiser = DrafterOptimiser(drafter, arguments.matrix_rate, arguments.other_rate)
    begun = time.time()
    for count, (tokens, weights) in enumerate(batches(arguments.data, arguments.rows, target.embed_tokens.device), 1):
        part = (time.time() - begun) / arguments.seconds
        if part >= 1:
            break
        loss, length = block_loss(drafter, target, tokens, weights, arguments.anchors)
        loss.backward()
        optimiser.step(max(0.01, min(1.0, part / 0.02, (1 - part) / 0.6)))
        if count in (1, 10, 100) or count % 250 == 0:
            line = {"step": count, "seconds": round(time.time() - begun, 1)}
            print(
                json.dumps(line | {"loss": round(float(loss.detach()), 4), "length": round(float(length), 3)}),
                flush=True,
            )
    finish(drafter)


def main() -> None:
    """Train, save, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=96, help="blocks taught per row")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=4e-3)
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 4, 6, 8])
    parser.add_argument("--eval-rows", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    checkpoint = load_checkpoint(arguments.model)
    target = restore(checkpoint.config, checkpoint.tensors).to(arguments.device).eval()
    target.requires_grad_(False)
    config = DrafterConfig(checkpoint.config.vocab_size, checkpoint.config.hidden_size, tuple(arguments.taps))
    drafter = DrafterModel(config).to(arguments.device)
    train(drafter, target, arguments)
    print(json.dumps({"bytes": save_drafter(drafter, arguments.out)}), flush=True)
    for name, lengths in evaluate(drafter, target, arguments.data, arguments.eval_rows):
        print(json.dumps({"set": name, "acceptance": lengths}), flush=True)


if __name__ == "__main__":
    main()
