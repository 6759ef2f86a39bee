"""Text and tokens of a checkpoint folder in Hugging Face's layout, without loading its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from validation.targets.base import TargetError
from validation.targets.chat import encode_chat

HASHED_BYTES = 4 * 2**30
"""Weights up to this size are hashed in full; of larger ones, names and sizes."""


class CheckpointText:
    """A checkpoint's tokenizer, chat template, end tokens and dimensions.

    Raises:
        TargetError: there is no such folder, or no config.json in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise TargetError(f"model {folder}: no config.json there; give a checkpoint folder")
        self._config = self._json("config.json")

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat under the template of `tokenizer_config.json`."""
        return encode_chat(self._tokenizer, self.folder / "tokenizer_config.json", messages)

    def stop_tokens(self) -> list[int]:
        """Tokens that end an answer, as the checkpoint says."""
        known = self._json("generation_config.json") if (self.folder / "generation_config.json").is_file() else {}
        ids = known.get("eos_token_id", self._config.get("eos_token_id"))
        return [ids] if type(ids) is int else [i for i in ids or () if type(i) is int]

    def dims(self) -> dict[str, int]:
        """Dimensions by the names of `config.json`."""
        return {name: value for name, value in self._config.items() if type(value) is int}

    def digest(self) -> str:
        """Identity of the weights: their SHA-256, or that of names and sizes where they are large."""
        files = sorted(self.folder.glob("*.safetensors"))
        whole = sum(file.stat().st_size for file in files) <= HASHED_BYTES
        sha = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file in files:
            sha.update(f"{file.name}/{file.stat().st_size}/".encode())
            if whole:
                sha.update(file.read_bytes())
        return sha.hexdigest() if whole else f"names and sizes: {sha.hexdigest()}"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise TargetError(f"model {self.folder}: no tokenizer.json beside config.json")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises bare Exception for a malformed file.
            raise TargetError(f"{file}: not a tokenizer file ({error})") from None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TargetError(f"{self.folder / name}: cannot be read ({error})") from None
        if not isinstance(content, dict):
            raise TargetError(f"{self.folder / name}: not a table")
        return content
