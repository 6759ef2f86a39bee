"""The kinds of targets by name. A target's module is imported when the target is asked for, not before."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from validation.errors import UsageError, one_line
from validation.loading import load_object
from validation.targets.base import Target, TargetError

TARGETS: dict[str, str] = {
    "builtin": "validation.targets.builtin:BuiltinTarget",
}
"""Target kind -> `module:attribute` of a class with `load(model_path: Path | None) -> Target`."""


def load_target(kind: str, model_path: Path | None) -> Target:
    """Open the model at `model_path`, or the embedded one for None, as a target of this kind.

    Raises:
        UsageError: no such kind, or the model cannot be read.
    """
    if kind not in TARGETS:
        raise UsageError(f"no target kind is called {kind!r}; kinds: {', '.join(sorted(TARGETS))}")
    if model_path is not None and not model_path.exists():
        raise UsageError(f"model {str(model_path)!r} does not exist; --model takes the folder of a checkpoint")
    factory = load_object(TARGETS[kind], f"target {kind!r}")
    try:
        return cast(Target, factory.load(model_path))
    except (TargetError, OSError, ValueError) as error:
        model = "the embedded model" if model_path is None else f"model {str(model_path)!r}"
        raise UsageError(f"{model} cannot be loaded: {one_line(error)}") from error
