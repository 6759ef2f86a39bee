"""A model's chat template, rendered as untrusted code: it comes with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from validation.targets.base import TargetError


def render_chat(file: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The chat as text, special tokens written out, with the marker that asks for an answer.

    Raises:
        TargetError: `file` (tokenizer_config.json) has no chat template, or it cannot be rendered.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        template = config["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{file}: no chat template can be read ({error!r})") from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    special = {name: str(value) for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    try:
        return environment.from_string(template).render(messages=list(messages), add_generation_prompt=True, **special)
    except (TemplateError, TypeError) as error:
        raise TargetError(f"{file}: the chat template cannot be rendered ({error})") from None
