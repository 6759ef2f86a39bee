"""`decodegate soak`: load for as long as you like, and canaries that must not change."""

from __future__ import annotations

from typing import Annotated

import typer

from validation.cli import options
from validation.cli.printing import say


def soak(
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, max=60 * 24 * 14, help="How long.")] = 10.0,
    model: options.ModelOption = None,
    fault: options.FaultOption = None,
    seed: options.SeedOption = None,
    drafts: Annotated[int, typer.Option("--drafts", min=0, max=7, help="Drafts of the candidate; 0 for none.")] = 7,
) -> int:
    """Answer random load on one engine, and ask the same few prompts again between it: their bits must not change.

    [bold]Examples[/bold]

    decodegate soak --minutes 480                 over night
    decodegate soak --minutes 2 --drafts 0        two minutes, without speculation
    decodegate soak --fault long-nan-in-one-slot  what a slot with one NaN does

    [bold]Exit codes[/bold]

    0 no canary changed, 1 one changed or an answer ended in an error, 2 wrong usage or bad input
    """
    from time import monotonic

    from validation.environment import set_threads
    from validation.errors import UsageError
    from validation.replay_files import fault_named
    from validation.soak.soak import MAX_CONTEXT, soak
    from validation.targets.base import ArmConfig
    from validation.targets.registry import load_target

    set_threads(None)
    target = load_target("builtin", model)
    config = ArmConfig(
        "candidate",
        "latency_specialized",
        "fp8",
        max_batch=8,
        max_context=MAX_CONTEXT,
        drafts=drafts,
        faults=tuple(fault_named(name) for name in fault or ()),
    )
    end = monotonic() + 60 * minutes
    try:
        seen = soak(target, target.open(config), seed or 0, lambda: monotonic() < end)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for line in seen.changed:
        say(line)
    say(seen.summary())
    return 1 if seen.failed or not seen.compared else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(soak)
