"""The kinds of targets by name. A target's module is imported when the target is asked for, not before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from validation.errors import UsageError, one_line
from validation.loading import load_object
from validation.targets.base import Target, TargetError

TARGETS: dict[str, str] = {
    "builtin": "validation.targets.builtin:BuiltinTarget",
    "openai": "validation.targets.openai:OpenAITarget",
    "vllm": "validation.targets.vllm:VllmTarget",
}
"""Target kind -> `module:attribute` of a class with `load(model_path: Path | None) -> Target`, or, where a profile's
`[target.options]` say more, `configured(model_path: Path | None, options: Mapping) -> Target`."""


def load_target(kind: str, model_path: Path | None, options: Mapping[str, Any] | None = None) -> Target:
    """Open the model at `model_path`, or the embedded one for None, as a target of this kind with these options.

    Raises:
        UsageError: no such kind, or the model cannot be read.
    """
    if kind not in TARGETS:
        raise UsageError(f"no target kind is called {kind!r}; kinds: {', '.join(sorted(TARGETS))}")
    if model_path is not None and not model_path.exists():
        raise UsageError(f"model {str(model_path)!r} does not exist; --model takes the folder of a checkpoint")
    factory = load_object(TARGETS[kind], f"target {kind!r}")
    configured = getattr(factory, "configured", None)
    if options and configured is None:
        raise UsageError(f"target {kind!r} takes no options, not {', '.join(sorted(options))}; remove [target.options]")
    if not options and hasattr(factory, "load"):
        configured = None
    try:
        return cast(Target, configured(model_path, options or {}) if configured else factory.load(model_path))
    except (TargetError, OSError, ValueError) as error:
        model = "the embedded model" if model_path is None else f"model {str(model_path)!r}"
        if configured:
            raise UsageError(f"target {kind!r} cannot be used: {one_line(error)}") from error
        raise UsageError(f"{model} cannot be loaded: {one_line(error)}") from error
