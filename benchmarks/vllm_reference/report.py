"""The comparison as Markdown: every figure beside its noise floor, answers, and the op-by-op explanation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.vllm_reference.compare import AnswerPair, Distance, answer_verdict
from benchmarks.vllm_reference.differences import KNOWN
from benchmarks.vllm_reference.explain import OpRow
from validation.gates.parity.judge import TYPICAL_MULTIPLE


def view_table(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """One view: the judged distance first, then the floors."""
    ratio = found["ratios"][found["widest"]]
    yield f"### {name}: {found['verdict']} the noise floor"
    yield ""
    yield f"Typical KL is {ratio.mean:.2f} of the widest floor ({found['widest']}), one-sided bounds"
    yield f"{ratio.lower:.2f} .. {ratio.upper:.2f} over {ratio.n} sequences; allowed are {TYPICAL_MULTIPLE} floors."
    yield ""
    yield "| comparison | tokens | typical KL | mean KL | p99 KL | logit RMS | top-1 flips | judged, in this floor |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    yield f"{_row('**vLLM / ours**', found['judged'])} - |"
    for floor, distance in found["floors"].items():
        ratio = found["ratios"][floor]
        yield f"{_row(f'floor: {floor}', distance)} {ratio.mean:.3g} ({ratio.lower:.3g} .. {ratio.upper:.3g}) |"
    yield ""
    yield "| margin of the reference's best token, logits | " + " | ".join(_bins(found["judged"])) + " |"
    yield "|---" * (1 + len(found["judged"].flips)) + "|"
    yield "| flips / tokens, vLLM / ours | " + " | ".join(_flips(found["judged"])) + " |"
    for floor, distance in found["floors"].items():
        yield f"| flips / tokens, floor: {floor} | " + " | ".join(_flips(distance)) + " |"
    yield ""


def _row(name: str, d: Distance) -> str:
    figures = f"{d.typical:.2e} | {d.mean:.2e} | {d.p99:.2e} | {d.logit_rms:.4f} | {d.flipped}"
    return f"| {name} | {d.tokens} | {figures} |"


def _bins(distance: Distance) -> list[str]:
    return [f"{bin_['low']:g} and up" if i else "0 and up" for i, bin_ in enumerate(distance.flips)]


def _flips(distance: Distance) -> list[str]:
    return [f"{bin_['flips']:.0f} / {bin_['tokens']:.0f}" for bin_ in distance.flips]


def answers_table(pairs: Sequence[AnswerPair]) -> Iterator[str]:
    """Greedy answers: equal ones by kind, and where the others part."""
    yield f"### Greedy answers: {answer_verdict(pairs)}"
    yield ""
    yield "| kind | answers | equal | part at a tie | part elsewhere |"
    yield "|---|--:|--:|--:|--:|"
    by_kind: dict[str, list[AnswerPair]] = defaultdict(list)
    for pair in pairs:
        by_kind[pair.kind].append(pair)
    for kind, group in by_kind.items():
        counts = [
            sum(p.equal for p in group),
            sum(p.tied for p in group),
            sum(not p.equal and not p.tied for p in group),
        ]
        yield f"| {kind} | {len(group)} | " + " | ".join(map(str, counts)) + " |"
    parted = [(index, pair) for index, pair in enumerate(pairs) if not pair.equal]
    if parted:
        yield ""
        yield "| answer | parts at token | ours, vLLM chose | margin of ours | margin of vLLM |"
        yield "|---|--:|---|--:|--:|"
    for index, pair in parted:
        margins = " | ".join(f"{margin:.4g}" for margin in pair.margins)
        yield f"| {index} ({pair.kind}) | {pair.first_difference} of {pair.tokens} | {pair.chosen} | {margins} |"
    yield ""


def op_table(rows: Sequence[OpRow], with_roundings: Sequence[OpRow]) -> Iterator[str]:
    """Ops on vLLM's own inputs, the layers together; `with_roundings` are the same ops with vLLM's roundings."""
    yield "### Op by op, on the inputs that vLLM's own modules saw"
    yield ""
    yield "One sequence, decode rows. `roundings` is the RMS difference in units of one BF16 rounding: 0 is bit-equal,"
    yield "about 1 is a rounding at another place. The last columns give our op vLLM's roundings (`contracts.py`)."
    yield ""
    yield "| op | layers | bit-equal | roundings, median | roundings, worst (layer) | bit-equal so | worst so |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    again: dict[str, list[OpRow]] = defaultdict(list)
    for row in with_roundings:
        again[row.op].append(row)
    by_op: dict[str, list[OpRow]] = defaultdict(list)
    for row in rows:
        by_op[row.op].append(row)
    for op, group in by_op.items():
        worst = max(group, key=lambda row: row.roundings)
        median = sorted(row.roundings for row in group)[len(group) // 2]
        yield (
            f"| {op} | {len(group)} | {_share(group)} | {median:.3g} | {worst.roundings:.3g} ({worst.layer}) | "
            f"{_share(again[op])} | {max((row.roundings for row in again[op]), default=float('nan')):.3g} |"
        )
    yield ""


def _share(rows: Sequence[OpRow]) -> str:
    return f"{sum(row.equal for row in rows) / len(rows):.2%}" if rows else "-"


def layer_table(places: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    """Hidden states of a free-running decode: how far vLLM's are from ours, beside ours from ours at two ranks."""
    yield "### Layer by layer, each running freely"
    yield ""
    yield "| place | vLLM / ours, relative RMS | ours at 2 ranks / ours | ratio |"
    yield "|---|--:|--:|--:|"
    for name, theirs, floor in places:
        ratio = f"{theirs / floor:.2f}" if floor else ("0" if not theirs else "floor is 0")
        yield f"| {name} | {theirs:.2e} | {floor:.2e} | {ratio} |"
    yield ""


def contract_table() -> Iterator[str]:
    """The known differences of roundings."""
    yield "### Known differences of roundings, from reading both"
    yield ""
    yield "| op | vLLM 0.33, one Hopper GPU | ours, generic | what can differ |"
    yield "|---|---|---|---|"
    for row in KNOWN:
        yield "| " + " | ".join(row) + " |"
    yield ""


def about_table(title: str, about: Mapping[str, Any], failures: Mapping[str, str]) -> Iterator[str]:
    """What ran: versions, device, the kernels chosen, what was substituted, and what failed."""
    yield f"### {title}"
    yield ""
    for name, value in about.items():
        if name != "environment":
            yield f"- {name}: {_plain(value)}"
    for part, message in failures.items():
        yield f"- **failed**: {part}: {_plain(message)}"
    yield ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value) or "none"
    return str(value).replace("|", "/").replace("\n", " ")[:300]
