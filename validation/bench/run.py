"""Measure everything that a bench was asked for; what is measured is on disk after every line."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import torch

from decode_impl.checkpoint import load_checkpoint
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.specialized.implementation import implementation
from decode_impl.weights import ModelWeights, shard_weights
from validation.bench.arms import tables_on
from validation.bench.ceiling import measure_ceiling
from validation.bench.clock import Clock
from validation.bench.lines import Line
from validation.bench.report import Report, markdown
from validation.bench.serving import ServingBench
from validation.bench.settings import Settings
from validation.bench.steps import StepBench
from validation.bench.traffic import weight_bytes
from validation.bench.weights import random_weights
from validation.errors import UsageError, describe
from validation.records.jsonio import named, pretty
from validation.records.storage import write_atomically
from validation.run.environment import environment

JSON_NAME, MARKDOWN_NAME = "bench.json", "bench.md"

Group = tuple[str, Callable[[], Iterator[Line]]]


def bench(settings: Settings, device: torch.device, out: Path, say: Callable[[Line], None]) -> Report:
    """Measure on `device`, which the settings are for. Writes bench.json and bench.md into `out`.

    Raises:
        UsageError: no such model, or a folder that holds a bench already or cannot be written.
    """
    config = settings.config()
    if (out / JSON_NAME).exists():
        raise UsageError(f"{str(out)!r} holds a bench already; give another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{str(out)!r} cannot be made: {error.strerror}; give another folder with --out") from error
    clock = Clock(device)
    report = Report(
        environment=environment(),
        settings=settings,
        model=f"{config.name}, {config.num_hidden_layers} layers, {'trained' if settings.shard is None else 'random'}",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        implementation=implementation(device),
        clock=clock.name,
        arms=tables_on(device).words,
    )
    _write(report, out)
    with torch.inference_mode():
        _measure(report, clock, out, say)
    return report


def _measure(report: Report, clock: Clock, out: Path, say: Callable[[Line], None]) -> None:
    settings, begun = report.settings, monotonic()
    weights = _weights(settings, clock.device)
    report.weights_bytes = weight_bytes(weights)
    ceiling = measure_ceiling(clock)
    report.ceiling = {"copy": ceiling.copy, "read": ceiling.read}
    end = begun + settings.budget if settings.budget else float("inf")
    for name, lines in _groups(settings, weights, clock, ceiling.bytes_per_second):
        if monotonic() > end:
            report.unmeasured.append(name)
        else:
            _take(name, lines, report, end, begun, out, say)
        gc.collect()
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
    report.seconds = monotonic() - begun
    _write(report, out)


def _take(
    name: str,
    lines: Callable[[], Iterator[Line]],
    report: Report,
    end: float,
    begun: float,
    out: Path,
    say: Callable[[Line], None],
) -> None:
    """Add a group's lines as they come; one that fails ends its group with what went wrong."""
    source = lines()
    while True:
        try:
            line = next(source, None)
        except (UsageError, KeyboardInterrupt):
            raise
        except Exception as error:
            line, source = Line(name, error=describe(error)[:400]), iter(())
        if line is not None:
            report.lines.append(line)
            report.seconds = monotonic() - begun
            _write(report, out)
            say(line)
        if line is None:
            return
        if monotonic() > end:
            report.unmeasured.append(f"the rest of {name}")
            return


def _groups(settings: Settings, weights: ModelWeights, clock: Clock, bytes_per_second: float) -> Iterator[Group]:
    tables = tables_on(clock.device)
    steps = StepBench(weights, tables, clock, bytes_per_second, settings.context, settings.rounds, settings.seed)
    served = settings.served
    serving = ServingBench(weights, tables, settings.prompt, settings.output, min(3, settings.rounds), settings.seed)
    yield "decode steps", lambda: steps.lines(settings.batches, 0)
    for drafts in settings.drafts:
        yield f"verify steps of {drafts} drafts", lambda drafts=drafts: steps.lines(settings.batches, drafts)  # type: ignore[misc]
    if served:
        yield "serving", lambda: serving.lines(served)
    if settings.compiled:
        yield "generic beside torch.compile", lambda: steps.against_compiled(settings.batches)


def _weights(settings: Settings, device: torch.device) -> ModelWeights:
    if settings.shard is not None:
        return random_weights(settings.config(), device, settings.seed)
    checkpoint = load_checkpoint(EMBEDDED_MODEL)
    return shard_weights(checkpoint.config, checkpoint.tensors, 1, device)


def _write(report: Report, out: Path) -> None:
    write_atomically(out / JSON_NAME, pretty(named(report.json())))
    write_atomically(out / MARKDOWN_NAME, markdown(report).encode())
