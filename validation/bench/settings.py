"""What a bench is asked to measure, checked where it enters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from decode_impl.config import ModelConfig
from decode_impl.config_fields import ConfigError
from decode_impl.presets import K3_MINI, k3_shard
from decode_impl.specialized.contract import MAX_DRAFTS, MAX_ROWS, MIN_DRAFTS
from validation.errors import UsageError

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (3, 5, 7)
_MOST_TOKENS = 4096
"""Most tokens of a prompt or of an answer; the context may be longer."""


_USUAL = {
    "cuda": {"served": (1, 8), "context": 4096, "prompt": 64, "output": 32, "rounds": 15},
    "cpu": {"served": (1, 4), "context": 256, "prompt": 32, "output": 8, "rounds": 3},
}


@dataclass(frozen=True)
class Settings:
    """Everything that a bench's figures depend on besides the machine. `layers` None: all that the model has."""

    context: int
    prompt: int
    output: int
    rounds: int
    served: tuple[int, ...]
    batches: tuple[int, ...] = BATCHES
    drafts: tuple[int, ...] = DRAFTS
    shard: int | None = None
    layers: int | None = None
    budget: float | None = None
    compiled: bool = False
    seed: int = 0

    @classmethod
    def on(cls, device: torch.device, **chosen: Any) -> Settings:
        """What was chosen (None: not), and for the rest what is usual on a device.

        Raises:
            UsageError: a value that no bench can have, or that this device cannot.
        """
        given = {name: value for name, value in chosen.items() if value is not None}
        settings = cls(**{**_USUAL[device.type], **given})
        for wrong, message in settings._problems(device.type == "cuda"):
            if wrong:
                raise UsageError(message)
        return settings

    def _problems(self, large: bool) -> list[tuple[bool, str]]:
        rows = [n for n in (*self.batches, *self.served) if not 1 <= n <= MAX_ROWS]
        drafts = [n for n in self.drafts if not MIN_DRAFTS <= n <= MAX_DRAFTS]
        lengths = [n for n in (self.prompt, self.output) if not 1 <= n <= _MOST_TOKENS]
        longest = max(self.context, self.prompt + self.output)
        most = K3_MINI.max_position_embeddings if self.shard is None else 1 << 17
        return [
            (self.shard is not None and not large, "--shard needs a CUDA device; leave it out to bench k3-mini"),
            (self.compiled and not large, "--against-compile needs a CUDA device; leave it out here"),
            (self.layers is not None and self.shard is None, "--layers needs --shard; k3-mini has all of its layers"),
            (not self.batches, "no --batch is given; give one from 1 to 64, or leave it out"),
            (bool(rows), f"--batch or --serve is {rows}, allowed are 1 to {MAX_ROWS}"),
            (bool(drafts), f"--drafts is {drafts}, allowed are {MIN_DRAFTS} to {MAX_DRAFTS}, or --no-drafts"),
            (bool(lengths), f"--prompt or --output is {lengths}, allowed are 1 to {_MOST_TOKENS}"),
            (longest + MAX_DRAFTS >= most, f"a context of {longest} tokens is given, at most {most - 8} fit"),
            (self.rounds < 1, f"--rounds is {self.rounds}, at least 1 is needed"),
        ]

    def config(self) -> ModelConfig:
        """The model.

        Raises:
            UsageError: no such shard, or more layers than the model has.
        """
        if self.shard is None:
            return K3_MINI
        try:
            config = k3_shard(self.shard)
        except ConfigError as error:
            raise UsageError(f"--shard: {error}") from None
        layers = config.num_hidden_layers if self.layers is None else self.layers
        if not 2 <= layers <= config.num_hidden_layers:
            raise UsageError(f"--layers is {layers}, allowed are 2 to {config.num_hidden_layers}")
        full = tuple(i for i in config.full_attention_layers if i < layers)
        return replace(config, num_hidden_layers=layers, full_attention_layers=full)
