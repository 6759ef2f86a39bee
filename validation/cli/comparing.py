"""`decodegate compare`: two servers that speak OpenAI's protocol, judged by the gates that can see enough of them."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from validation.cli import options

BASELINE_KEY, CANDIDATE_KEY = "DECODEGATE_BASELINE_API_KEY", "DECODEGATE_CANDIDATE_API_KEY"
"""Environment variables that hold the servers' API keys. Nothing else is ever sent as a key."""


class Backend(StrEnum):
    """What the candidate's server must show that it runs."""

    SPECIALIZED = "latency_specialized"
    ANY = "any"


class Api(StrEnum):
    """Dialects of OpenAI's protocol."""

    CHAT = "chat"
    COMPLETIONS = "completions"


_SERVERS = "The servers"

BaselineOption = Annotated[
    str,
    typer.Option(
        "--baseline", metavar="URL", help="Server of the baseline: http://host:8000/v1", rich_help_panel=_SERVERS
    ),
]
CandidateOption = Annotated[
    str, typer.Option("--candidate", metavar="URL", help="Server of the candidate.", rich_help_panel=_SERVERS)
]
ModelNameOption = Annotated[
    str,
    typer.Option(
        "--model-name",
        metavar="NAME",
        help="Model to ask. Default: the only one that a server lists.",
        rich_help_panel=_SERVERS,
    ),
]
CandidateModelOption = Annotated[
    str,
    typer.Option(
        "--candidate-model-name", metavar="NAME", help="Where the candidate's is another.", rich_help_panel=_SERVERS
    ),
]
ApiOption = Annotated[
    Api, typer.Option("--api", help="chat, or completions for models without a chat.", rich_help_panel=_SERVERS)
]
BackendOption = Annotated[
    Backend,
    typer.Option(
        "--backend",
        help="What the candidate must show that it runs; any compares the servers as they are.",
        rich_help_panel=_SERVERS,
    ),
]
SignOption = Annotated[
    str,
    typer.Option(
        "--sign",
        metavar="TEXT",
        help="Text that the candidate's log or metrics hold only if it decodes by its own path.",
        rich_help_panel=_SERVERS,
    ),
]
LogOption = Annotated[
    str,
    typer.Option("--log", metavar="FILE", help="Log of the candidate's server, for --sign.", rich_help_panel=_SERVERS),
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(
        "--concurrency",
        min=1,
        max=4096,
        metavar="N",
        help="Questions on their way at once, both servers together.",
        rich_help_panel=_SERVERS,
    ),
]
AnswerOption = Annotated[
    float,
    typer.Option(
        "--answer-seconds",
        min=0.1,
        metavar="S",
        help="Longest time for one answer; a later one is an error of its arm.",
        rich_help_panel=_SERVERS,
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        "--patience-seconds",
        min=0,
        metavar="S",
        help="How long a server may be away before the run stops; it can be resumed.",
        rich_help_panel=_SERVERS,
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Folder with the published sets, for a profile that asks them.",
        rich_help_panel=_SERVERS,
    ),
]


def compare(
    baseline: BaselineOption,
    candidate: CandidateOption,
    model_name: ModelNameOption = "",
    candidate_model_name: CandidateModelOption = "",
    api: ApiOption = Api.CHAT,
    backend: BackendOption = Backend.SPECIALIZED,
    sign: SignOption = "",
    log: LogOption = "",
    concurrency: ConcurrencyOption = 16,
    answer_seconds: AnswerOption = 1800.0,
    patience_seconds: PatienceOption = 600.0,
    data_dir: DataDirOption = None,
    profile: options.ProfileOption = None,
    gate: options.GateOption = None,
    seed: options.SeedOption = None,
    keep_going: options.KeepGoingOption = False,
    out: options.OutOption = Path("runs"),
    output: options.FormatOption = options.OutputFormat.TEXT,
    bisect_exit: options.BisectOption = False,
) -> int:
    """Judge one server against another: both are asked the same questions, side by side.

    Gates of the profile that need to see more than answers are named as not judged. API keys are read from
    DECODEGATE_BASELINE_API_KEY and DECODEGATE_CANDIDATE_API_KEY, and are written nowhere.

    [bold]Examples[/bold]

    decodegate compare --baseline http://a:8000/v1 --candidate http://b:8000/v1
    decodegate compare --baseline http://a:8000 --candidate http://b:8000 --backend any   as they are
    decodegate run --resume 20260102-030405-abcdef     go on with a comparison that was stopped

    [bold]Exit codes[/bold]

    0 pass, 1 fail, 2 wrong usage or bad input, 3 inconclusive, 4 error of the machinery, 130 interrupted
    """
    from validation.cli.running import RunOptions, judge
    from validation.errors import UsageError
    from validation.profile import DEFAULT_PROFILE

    if sign and backend is Backend.ANY:
        raise UsageError(
            "--sign shows the candidate's own path, and --backend any asks for none; leave one of them out"
        )
    target: dict[str, Any] = {
        "baseline": {"url": baseline, "model": model_name, "api": api.value, "key_variable": _set(BASELINE_KEY)},
        "candidate": {
            "url": candidate,
            "model": candidate_model_name or model_name,
            "api": api.value,
            "key_variable": _set(CANDIDATE_KEY),
            "sign": sign,
            "log": log,
        },
        "concurrency": concurrency,
        "answer_seconds": answer_seconds,
        "patience_seconds": patience_seconds,
    }
    name = profile or DEFAULT_PROFILE
    chosen = RunOptions(
        profile=name,
        gates=tuple(dict.fromkeys(gate or ())),
        model=None,
        faults=(),
        seed=seed,
        threads=None,
        workers=1,
        resume=None,
        keep_going=keep_going,
        out=out,
        bisect=bisect_exit,
        github=output is options.OutputFormat.GITHUB,
        given=_profile(name, target, backend, data_dir),
        command=("decodegate", "compare", "--baseline", baseline, "--candidate", candidate, "--profile", name),
    )
    return judge(chosen)


def _set(variable: str) -> str:
    return variable if os.environ.get(variable) else ""


def _profile(name: str, target: dict[str, Any], backend: Backend, data_dir: Path | None) -> Any:
    """The profile of this name, for two servers; required is every gate that can see enough of a server."""
    from validation.errors import UsageError
    from validation.gates.registry import load_gate
    from validation.profile import load_profile, profile_from
    from validation.targets.openai import OpenAITarget

    base = load_profile(name)[1]
    seeing = [gate for gate in base.gates if load_gate(gate).needs <= OpenAITarget.capabilities]
    if not seeing:
        raise UsageError(f"profile {name!r} has no gate that can judge a server; one with [gates.evals] is needed")
    gates = {name: dict(settings) for name, settings in base.gates.items()}
    if data_dir is not None:
        if gates.get("evals", {}).get("origin") != "published":
            wanted = '--data-dir has published sets; give a profile with origin = "published" in [gates.evals]'
            raise UsageError(f"profile {name!r} asks generated items, and {wanted}")
        gates["evals"]["data_dir"] = str(data_dir.resolve())
    if "parity" in gates:
        # A server is what it was started as: one cell, and no schedule of ours.
        cell: Any = {"kv_cache_dtype": base.baseline.kv_cache_dtype, "tensor_parallel": [1], "batches": [1, 8]}
        gates["parity"] |= {"cells": [cell], "schedules": []}
    own = "auto" if backend is Backend.ANY else backend.value
    return profile_from(
        {
            **base.content(),
            "model": {},
            "target": {"kind": OpenAITarget.name, "options": target},
            "baseline": {**base.baseline.model_dump(), "decode_backend": "auto"},
            "candidate": {**base.candidate.model_dump(), "decode_backend": own},
            "required": seeing,
            "gates": gates,
        },
        name,
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compare)
