"""`decodegate replay`: has a failure of an earlier run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from validation.cli.printing import say
from validation.errors import UsageError, one_line

_MOST_BYTES = 32 * 2**20


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of a run's replays/ folder, or of a fuzz run.")],
) -> int:
    """Play one failure again: a numerics case, a schedule, an explorer's trace or a delay plan, as its file says.

    [bold]Examples[/bold]

    decodegate replay runs/20260102-030405-abcdef/replays/sync-in-place-2.json
    decodegate replay runs/fuzz/candidate-7.json

    [bold]Exit codes[/bold]

    0 it does not fail any more, 1 it fails again, 2 no such file, or none that can be replayed
    """
    from validation.records.replay_files import PLAYERS
    from validation.run.environment import set_threads

    content = _read(file)
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in PLAYERS:
        raise UsageError(f"{str(file)!r} is of no kind that can be replayed; kinds: {', '.join(sorted(PLAYERS))}")
    set_threads(None)
    wrong = PLAYERS[kind](content)
    for line in wrong:
        say(line)
    say(f"{kind}: {'fails again' if wrong else 'does not fail'}")
    return 1 if wrong else 0


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{str(file)!r} is larger than {_MOST_BYTES} bytes; no replay file is")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be read: {error.strerror or one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(file)!r} is not JSON: {one_line(error)[:200]}") from error


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(replay)
