"""A chat as tokens: a checkpoint's template is untrusted code, and what is said in a chat never becomes control."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from validation.targets.base import TargetError


def encode_chat(tokenizer: Tokenizer, file: Path, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat, with the marker that asks for an answer; `file` is tokenizer_config.json.

    The template is rendered around placeholders. Its own special tokens are control; those spelled out in a message's
    content are text.

    Raises:
        TargetError: there is no chat template, it cannot be rendered, or it does not repeat the contents as they are.
    """
    held = [{**message, "content": f"\x00{i}\x00"} for i, message in enumerate(messages)]
    pieces = re.split(r"\x00(\d+)\x00", _render(file, held))
    if sorted(int(i) for i in pieces[1::2]) != list(range(len(messages))):
        raise TargetError(f"{file}: the chat template changes, drops or repeats what is said; its tokens are not known")
    ids: list[int] = []
    for place, piece in enumerate(pieces):
        said = place % 2 == 1
        tokenizer.encode_special_tokens = said
        try:
            text = str(messages[int(piece)]["content"]) if said else piece
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            tokenizer.encode_special_tokens = False
    return ids


def _render(file: Path, messages: Sequence[Mapping[str, str]]) -> str:
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
