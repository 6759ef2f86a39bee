"""`decodegate soak`: load for as long as you like, and canaries that must not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import options
from validation.cli.comparing import CANDIDATE_KEY, Api
from validation.cli.printing import say

if TYPE_CHECKING:
    from validation.soak.soak import Soaked

_SERVER = "A server in place of the embedded engine"


def soak(
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, max=60 * 24 * 14, help="How long.")] = 10.0,
    model: options.ModelOption = None,
    fault: options.FaultOption = None,
    seed: options.SeedOption = None,
    drafts: Annotated[int, typer.Option("--drafts", min=0, max=7, help="Drafts of the candidate; 0 for none.")] = 7,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="http://host:8000/v1", rich_help_panel=_SERVER)] = "",
    model_name: Annotated[
        str,
        typer.Option(
            "--model-name",
            metavar="NAME",
            help="Model to ask. Default: the only one that it lists.",
            rich_help_panel=_SERVER,
        ),
    ] = "",
    api: Annotated[
        Api, typer.Option("--api", help="chat, or completions for models without a chat.", rich_help_panel=_SERVER)
    ] = Api.CHAT,
    answer_seconds: Annotated[
        float,
        typer.Option("--answer-seconds", min=0.1, metavar="S", help="Longest answer.", rich_help_panel=_SERVER),
    ] = 600.0,
    patience_seconds: Annotated[
        float,
        typer.Option(
            "--patience-seconds", min=0, metavar="S", help="How long it may be away.", rich_help_panel=_SERVER
        ),
    ] = 60.0,
) -> int:
    """Answer random load, and ask the same few prompts again between it: their answers must not change.

    On the embedded engine their bits are compared. On a server (--url), the text, and what else it gives: its
    log-probabilities, and those of the whole vocabulary where it can be forced; the last line says what was compared.
    An API key is read from DECODEGATE_CANDIDATE_API_KEY.

    [bold]Examples[/bold]

    decodegate soak --minutes 480                 over night
    decodegate soak --minutes 2 --drafts 0        two minutes, without speculation
    decodegate soak --fault long-nan-in-one-slot  what a slot with one NaN does
    decodegate soak --url http://host:8000/v1 --minutes 60   a server that speaks OpenAI's protocol

    [bold]Exit codes[/bold]

    0 no canary changed, 1 one changed, an answer ended in an error or the server went away, 2 wrong usage or bad input
    """
    from validation.errors import UsageError

    given = [name for name, value in (("--model", model), ("--fault", fault)) if value]
    if url and given:
        raise UsageError(f"--url names a server, which loads its own model; leave {' and '.join(given)} out")

    go_on = _for_minutes(minutes)
    try:
        if url:
            seen = _soak_server(url, model_name, api.value, (answer_seconds, patience_seconds), seed or 0, go_on)
        else:
            seen = _soak_engine(model, tuple(fault or ()), drafts, seed or 0, go_on)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for line in seen.changed:
        say(line)
    say(seen.summary())
    return 1 if seen.failed or not seen.compared else 0


def _for_minutes(minutes: float) -> Callable[[], bool]:
    """True for so long from when it is first asked: the first answers of all canaries do not count."""
    from time import monotonic

    began: list[float] = []

    def go_on() -> bool:
        began[:] = began or [monotonic()]
        return monotonic() < began[0] + 60 * minutes

    return go_on


def _soak_engine(
    model: Path | None, faults: tuple[str, ...], drafts: int, seed: int, go_on: Callable[[], bool]
) -> Soaked:
    from validation.records.replay_files import fault_named
    from validation.run.environment import set_threads
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
        faults=tuple(fault_named(name) for name in faults),
    )
    return soak(target, target.open(config), seed, go_on)


def _soak_server(
    url: str, model: str, api: str, seconds: tuple[float, float], seed: int, go_on: Callable[[], bool]
) -> Soaked:
    import os

    from evals.runner.client import EndpointDown
    from evals.runner.endpoint import Endpoint, Limits
    from validation.errors import UsageError, one_line
    from validation.soak.server import Server, soak_server

    key = CANDIDATE_KEY if os.environ.get(CANDIDATE_KEY) else ""
    limits = Limits(answer=seconds[0], patience=seconds[1])
    try:
        return soak_server(Server(Endpoint(url, model, api, key), seed, limits), go_on)
    except EndpointDown as error:
        raise UsageError(one_line(error)) from None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(soak)
