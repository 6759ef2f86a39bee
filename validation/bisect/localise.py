"""`bisect layers` and `bisect tokens`: where the candidate's added error first leaves the noise floor.

Between the parts of every layer the candidate's distance from the baseline is compared with the floor's, by sequence,
as the parity gate compares caches. A layer sees nothing of those behind it, and with the tokens given, a token nothing
of those after it: the first boundary and the first token that are out are where the error is made. The first pass keeps
one figure per boundary, token and sequence; the second keeps the tensors of the one place that was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evals.statistics import Interval, bootstrap_mean
from validation.bisect.question import ParityQuestion
from validation.gates.parity.judge import ALPHA, CACHE_MULTIPLE
from validation.gates.parity.layers import RESOLUTION, relative_differences
from validation.gates.parity.measure import other_composition
from validation.targets.base import ForcedStep
from validation.verdict import Verdict

ARMS = ("baseline", "candidate", "floor")
LOGITS = "head.logits"


@dataclass(frozen=True)
class Place:
    """A boundary and a token (its position in the text), with the candidate's distance there in floors."""

    boundary: str
    position: int
    ratio: Interval


@dataclass(frozen=True)
class Errors:
    """Relative RMS differences from the baseline, f64 [boundaries, tokens, sequences]; `first` token's position."""

    boundaries: Sequence[str]
    first: int
    candidate: Tensor
    floor: Tensor


@dataclass(frozen=True)
class Located:
    """Where the error begins. `over_tokens` has each boundary's ratio over all tokens, in the order of a step.

    `layer` is the first boundary that is out and its first token; `token` the first token at which any boundary is out,
    and its first boundary. None where nothing is out.
    """

    over_tokens: dict[str, Interval]
    layer: Place | None
    token: Place | None

    @property
    def verdict(self) -> Verdict:
        """FAIL where something is out, PASS where all boundaries are shown to be within, else INCONCLUSIVE."""
        if self.layer is not None:
            return Verdict.FAIL
        within = all(ratio.upper <= CACHE_MULTIPLE for ratio in self.over_tokens.values())
        return Verdict.PASS if within else Verdict.INCONCLUSIVE


def measure(question: ParityQuestion) -> Errors:
    """The first pass: decode the cell's texts in all arms, and keep one figure per boundary, token and sequence."""
    groups = []
    for group, company in _groups(question):
        steps = [_relative(arms) for arms in _lockstep(question, group, company)]
        groups.append([torch.stack([step[arm] for step in steps], dim=1) for arm in range(2)])
    candidate, floor = (torch.cat([group[arm] for group in groups], dim=2) for arm in range(2))
    return Errors(_names(question), question.cell.prompt, candidate, floor)


def locate(errors: Errors, seed: int) -> Located:
    """The first boundary and the first token that are out.

    One half of ALPHA is for the boundaries over all tokens, the other for each at each token, shared out evenly.
    """
    names, tokens = errors.boundaries, errors.candidate.shape[1]
    alphas = ALPHA / 2 / len(names), ALPHA / 2 / (len(names) * tokens)
    logs = [(e + RESOLUTION).log() for e in (errors.candidate, errors.floor)]
    difference = logs[0] - logs[1]
    over = [_ratio(difference[b].mean(0), alphas[0], seed) for b in range(len(names))]
    means = difference.mean(2)

    def place(b: int, t: int) -> Place:
        return Place(names[b], errors.first + t, _ratio(difference[b, t], alphas[1], seed))

    def out(b: int, t: int) -> bool:
        # A lower bound is never above the mean, which costs no bootstrap.
        return bool(means[b, t] > math.log(CACHE_MULTIPLE)) and _out(place(b, t).ratio)

    layer = token = None
    for b in range(len(names)):
        alone = [t for t in range(tokens) if out(b, t)]
        if alone or _out(over[b]):
            # Out over all tokens but at none of them alone: the token where it is furthest.
            layer = place(b, alone[0] if alone else int(means[b].argmax()))
            break
    for t in range(tokens):
        outside = [b for b in range(len(names)) if out(b, t)]
        if outside:
            token = place(outside[0], t)
            break
    return Located(dict(zip(names, over, strict=True)), layer, token or layer)


def boundary_tensors(question: ParityQuestion, place: Place) -> dict[str, Tensor]:
    """The second pass: the tensors on both sides of a place at its token, by `<arm>.<boundary>`, f32 [sequences, H].

    `tokens`, i64 [sequences, length], are the texts up to and with that token.
    """
    names = _names(question)
    index = names.index(place.boundary)
    wanted = names[max(index - 1, 0) : index + 1]
    kept: dict[str, list[Tensor]] = {f"{arm}.{name}": [] for arm in ARMS for name in wanted}
    texts: list[Sequence[int]] = []
    for group, company in _groups(question):
        for offset, arms in enumerate(_lockstep(question, group, company)):
            if question.cell.prompt + offset == place.position:
                for arm, boundaries in zip(ARMS, arms, strict=True):
                    for name in wanted:
                        kept[f"{arm}.{name}"].append(boundaries[name].clone())
                break
        texts += [text[: place.position + 1] for text in group]
    return {**{name: torch.cat(parts).contiguous() for name, parts in kept.items()}, "tokens": torch.tensor(texts)}


Boundaries = dict[str, Tensor]


def _names(question: ParityQuestion) -> list[str]:
    """Boundaries in the order of a step, with the logits behind them."""
    parts = ("attention_in", "mlp_in", "mlp_out")
    layers = range(question.target.dims()["num_hidden_layers"])
    return [f"layer.{layer}.{part}" for layer in layers for part in parts] + ["head.in", LOGITS]


def _groups(question: ParityQuestion) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Texts that are decoded together, and with the company that a single one needs, as in the parity gate."""
    batch = int(question.cell.unit().params["batch"])
    texts = question.sequences(-(-max(batch, question.cell.sequences) // batch) * batch)
    for first in range(0, len(texts), batch):
        group = texts[first : first + batch]
        yield group, [*group, texts[first - 1]] if batch == 1 else group


def _lockstep(
    question: ParityQuestion, group: Sequence[Sequence[int]], company: Sequence[Sequence[int]]
) -> Iterator[tuple[Boundaries, ...]]:
    """The boundaries of every step in all arms, side by side; those of the floor's parts put together again."""
    baseline, candidate, floor = (question.target.open(replace(arm, boundaries=True)) for arm in question.arms())
    parts = [[company[i] for i in part] for part in other_composition(len(group))]
    with ExitStack() as open_decodes:
        decodes = []
        for arm, texts in ((baseline, group), (candidate, group), *((floor, part) for part in parts)):
            decodes.append(arm.forced_decode(texts, question.cell.prompt))
            open_decodes.callback(decodes[-1].close)
        for steps in zip(*decodes, strict=True):
            reference, judged, *floors = (_boundaries(step) for step in steps)
            joined = {name: torch.cat([one[name] for one in floors])[: len(group)] for name in reference}
            yield reference, judged, joined


def _boundaries(step: ForcedStep) -> Boundaries:
    """A step's boundaries and, as the last of them, its logits without their mean, which softmax ignores."""
    return {**step.boundaries, LOGITS: step.logits - step.logits.mean(-1, keepdim=True)}


def _relative(arms: tuple[Boundaries, ...]) -> tuple[Tensor, Tensor]:
    """Candidate's and floor's relative RMS difference from the baseline, f64 [boundaries, sequences] each."""
    reference, candidate, floor = arms
    return relative_differences(reference, candidate), relative_differences(reference, floor)


def _ratio(logs: Tensor, alpha: float, seed: int) -> Interval:
    log = bootstrap_mean(logs.tolist(), alpha, seed)
    return Interval(math.exp(log.mean), math.exp(log.lower), math.exp(log.upper), alpha, log.n)


def _out(ratio: Interval) -> bool:
    return ratio.lower > CACHE_MULTIPLE
