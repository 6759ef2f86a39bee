"""The byte-level tokenizer of k3-mini: ids 0..255 are the bytes, special tokens follow, no merges."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 320
SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<think>",
    "</think>",
)
"""Special tokens from id 256 on; the rest of the vocabulary is reserved."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One marker per role, the text, an end marker. An answer ends with `<|end|>`."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level `tokenizers` file, by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in kept else spare))
        spare += byte not in kept
    return letters


def build_tokenizer() -> Tokenizer:
    """The tokenizer as an object; every byte string that is valid UTF-8 comes back unchanged."""
    names = [*SPECIALS, *(f"<|reserved_{i}|>" for i in range(VOCABULARY - 256 - len(SPECIALS)))]
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    vocabulary |= {name: 256 + i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def tokenizer_files() -> dict[str, Any]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`."""
    return {
        "tokenizer.json": json.loads(build_tokenizer().to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
