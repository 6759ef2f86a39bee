"""What the parity gate shows: the table of cells, flips by margin, KL by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from validation.gates.base import Plot, Table
from validation.gates.parity.judge import CACHE_MULTIPLE, TYPICAL_MULTIPLE, CellJudgement

_POSITION_BUCKETS = 8

_SHOWN = {"attention_in": "into attention", "mlp_out": "out of the layer"}
"""Boundaries of a layer that are drawn."""

_HEAD = "head.in"

Results = Mapping[str, Mapping[str, Any]]


def summary(results: Results, judged: Mapping[str, CellJudgement], undecided: Sequence[str], tokens: int) -> str:
    """One sentence: how much was decoded and what came of it."""
    worst = max(judged, key=lambda unit: judged[unit].ratio, default="")
    seen = f"{tokens} tokens in {len(results)} cells"
    if worst:
        seen += f"; largest typical KL {judged[worst].ratio:.3g} floors ({worst}), allowed {TYPICAL_MULTIPLE:.3g}"
    failed = [unit for unit, cell in judged.items() if cell.findings]
    if failed:
        return f"{seen}; beyond allowance: {', '.join(failed)}"
    if undecided:
        return f"{seen}; undecided: {', '.join(undecided)} ({_remedy(judged, undecided)})"
    return f"{seen}; all within allowance"


def _remedy(judged: Mapping[str, CellJudgement], undecided: Sequence[str]) -> str:
    if any(judged[unit].blind for unit in undecided):
        return "two roundings of the baseline give the same logits, so they would not show a wrong candidate either"
    return "more sequences would decide: raise most_sequences"


def cell_table(results: Results, judged: Mapping[str, CellJudgement]) -> Table:
    """A row per cell: KL and its distribution, floor, ratio, flips, overlap, caches."""
    rows = []
    for unit, result in results.items():
        cell, figures = judged[unit], result["candidate"]["summary"]
        flips = sum(b["flips"] for b in figures["flips"])
        caches = " / ".join(f"{ratio.mean:.2f}" for ratio in cell.caches.values())
        rows.append(
            [
                unit,
                result["tokens"],
                f"{cell.kl:.2e}",
                f"{cell.floor:.2e}",
                _bounded(cell),
                f"{figures['kl']['p99']:.1e} / {figures['kl']['p999']:.1e} / {figures['kl']['max']:.1e}",
                f"{figures['reverse_kl']['mean']:.2e}",
                f"{figures['logit_rms']['mean']:.3g}",
                flips,
                f"{figures['overlap']:.4f}",
                caches,
            ]
        )
    header = [
        "cell",
        "tokens",
        "mean KL",
        "floor",
        "typical KL in floors (upper bound)",
        "KL p99 / p99.9 / max",
        "reverse KL",
        "RMS logit difference",
        "top-1 flips",
        "top-10 overlap",
        "state / conv / latent, in floors",
    ]
    caption = (
        "KL(baseline || candidate) in nats a token, teacher-forced decode of held-out text. Floor: the baseline "
        "against itself, batched otherwise and with another number of ranks. Typical: geometric mean over tokens, "
        f"paired by sequence. Allowed: typical KL {TYPICAL_MULTIPLE:.3g} floors, caches {CACHE_MULTIPLE:.3g} floors "
        "(relative RMS)."
    )
    return Table("Parity by cache format, tensor parallelism and batch size", header, rows, caption)


def _bounded(cell: CellJudgement) -> str:
    return f"{cell.typical.mean:.2f} ({cell.typical.upper:.2f})" if cell.typical else "not compared"


def flip_table(results: Results) -> Table:
    """Top-1 flips by the baseline's margin, all cells together, candidate and floor."""
    rows: list[list[str | int | float]] = []
    for low, tokens, flips, floor_flips in _flips(results):
        rows.append([f">= {low:g}", tokens, flips, floor_flips])
    caption = (
        "Margin: the baseline's top-1 logit minus its top-2. Flips at small margins are rounding; at large ones, bugs."
    )
    return Table("Top-1 flips by margin", ["margin", "tokens", "candidate flips", "floor flips"], rows, caption)


def flip_plot(results: Results) -> Plot:
    """Share of tokens flipped, by margin."""
    counted = _flips(results)
    series: dict[str, list[float | None]] = {
        "candidate": [flips / tokens if tokens else None for _, tokens, flips, _ in counted],
        "floor": [floor / tokens if tokens else None for _, tokens, _, floor in counted],
    }
    labels = [f">= {low:g}" for low, *_ in counted]
    n = sum(tokens for _, tokens, _, _ in counted)
    return Plot("Top-1 flips by margin", "bar", labels, series, "margin (logits)", "share flipped", f"n = {n} tokens")


def _flips(results: Results) -> list[tuple[float, int, int, int]]:
    pairs = [(r["candidate"]["summary"]["flips"], r["floor"]["summary"]["flips"]) for r in results.values()]
    if not pairs:
        return []
    bins = range(len(pairs[0][0]))
    return [
        (
            pairs[0][0][i]["low"],
            sum(candidate[i]["tokens"] for candidate, _ in pairs),
            sum(candidate[i]["flips"] for candidate, _ in pairs),
            sum(floor[i]["flips"] for _, floor in pairs),
        )
        for i in bins
    ]


def position_plot(results: Results) -> Plot:
    """Mean KL by position bucket, candidate and floor, over all cells weighted by tokens."""
    if not results:
        return Plot("KL by position", "line", [], {}, "token position", "mean KL (nats)")
    first = next(iter(results.values()))
    positions = len(first["candidate"]["kl_by_position"])
    edges = [round(i * positions / _POSITION_BUCKETS) for i in range(_POSITION_BUCKETS + 1)]
    buckets = [(a, b) for a, b in pairwise(edges) if b > a]
    series: dict[str, list[float | None]] = {}
    for arm in ("candidate", "floor"):
        weighted = [(r["sequences"], r[arm]["kl_by_position"]) for r in results.values()]
        sequences = sum(n for n, _ in weighted)
        mean = [sum(n * kl[i] for n, kl in weighted) / sequences for i in range(positions)]
        series[arm] = [sum(mean[a:b]) / (b - a) for a, b in buckets]
    labels = [f"{first['prompt'] + a}-{first['prompt'] + b - 1}" for a, b in buckets]
    n = sum(r["tokens"] for r in results.values())
    return Plot(
        "KL by position", "line", labels, series, "token position", "mean KL (nats)", f"n = {n} tokens", log_y=True
    )


def ratio_plot(judged: Mapping[str, CellJudgement]) -> Plot:
    """Typical KL of every cell in floors, with the allowance."""
    series: dict[str, list[float | None]] = {
        "typical KL": [cell.typical.mean if cell.typical else None for cell in judged.values()],
        "upper bound": [cell.typical.upper if cell.typical else None for cell in judged.values()],
    }
    caption = "Floor: the baseline against itself, batched otherwise and with another number of ranks."
    title = "Typical KL in noise floors"
    return Plot(title, "bar", list(judged), series, "cell", "floors", caption, limit=TYPICAL_MULTIPLE)


def layer_plots(results: Results, judged: Mapping[str, CellJudgement]) -> list[Plot]:
    """The curve of the cell that is furthest out, by layer; nothing where no cell has one."""
    told = [unit for unit, result in results.items() if result.get("layers")]
    if not told:
        return []
    unit = max(told, key=lambda name: judged[name].ratio)
    layers = results[unit]["layers"]
    numbers = sorted({int(name.split(".")[1]) for name in layers["boundaries"] if name != _HEAD})
    series = {
        f"{arm}, {said}": _series(layers, arm, part, numbers)
        for part, said in _SHOWN.items()
        for arm in ("candidate", "floor")
    }
    caption = (
        f"Cell {unit}, n = {layers['tokens']} tokens: relative RMS difference of hidden states from the baseline's, "
        f"geometric mean over tokens (2^-9 added to each). Floor: the baseline against itself. {_HEAD} is behind the "
        "last layer. Nothing is decided by it; decodegate bisect layers does."
    )
    x = [*map(str, numbers), _HEAD]
    return [Plot("Divergence by layer", "line", x, series, "layer", "relative RMS difference", caption, log_y=True)]


def _series(layers: Mapping[str, Any], arm: str, part: str, numbers: Sequence[int]) -> list[float | None]:
    """One boundary of every layer; the hidden state behind the last layer ends what goes into attention."""
    found = dict(zip(layers["boundaries"], layers[arm], strict=True))
    behind = found.get(_HEAD) if part == "attention_in" else None
    return [*(found.get(f"layer.{number}.{part}") for number in numbers), behind]
